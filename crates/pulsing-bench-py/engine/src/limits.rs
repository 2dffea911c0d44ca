//! What this machine can hold, checked before the run: a client out of descriptors or ports measures itself.

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::error::BenchError;

/// Descriptors beside the connections: runtime, Python, files.
const SPARE: u64 = 64;

/// Raises the limit of open files as far as `connections` need and the system allows.
///
/// # Errors
/// [`BenchError::Config`] when descriptors or ports do not suffice, with the way out.
pub(crate) fn make_room(connections: usize) -> Result<(), BenchError> {
    let needed = connections as u64 + SPARE;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        if limit.maximum.is_some_and(|most| most < needed) {
            return Err(BenchError::Config(format!(
                "max_vus={connections} needs {needed} open files and this process may have {}; \
                 raise the limit (ulimit -Hn) or use fewer users",
                limit.maximum.unwrap_or_default()
            )));
        }
        limit.current = Some(needed);
        setrlimit(Resource::Nofile, limit).map_err(|error| BenchError::Runtime(error.into()))?;
    }
    match ports() {
        Some(ports) if ports < connections as u64 => Err(BenchError::Config(format!(
            "max_vus={connections} needs as many ports to one address and this machine has {ports}; \
             widen net.ipv4.ip_local_port_range or use fewer users"
        ))),
        _ => Ok(()),
    }
}

/// Ports for outgoing connections, where the system says.
fn ports() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ends = text.split_ascii_whitespace().map(str::parse::<u64>);
    let (low, high) = (ends.next()?.ok()?, ends.next()?.ok()?);
    Some(high.saturating_sub(low) + 1)
}

#[cfg(test)]
mod tests {
    use super::make_room;

    #[test]
    fn more_users_than_the_machine_can_connect_are_refused_with_the_way_out() {
        make_room(8).unwrap();
        let error = make_room(1_000_000).unwrap_err().to_string();
        assert!(error.contains("max_vus=1000000") && error.contains("use fewer users"), "{error}");
    }
}
