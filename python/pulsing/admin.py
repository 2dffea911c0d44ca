"""What a node tells about itself and others."""

from pulsing.core.helpers import get_metrics, get_node_info, health_check, list_actors, ping

__all__ = ["get_metrics", "get_node_info", "health_check", "list_actors", "ping"]
