//! Addresses: from what a user writes to what a node binds and tells others (M6).

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use super::config::{Security, SystemConfig};
use crate::error::{Error, Result};
use crate::net::transport::Transport;

/// What to bind and, once the port is known, which IP to tell others.
pub(super) struct Binding {
    pub(super) bind: SocketAddr,
    pub(super) advertise: IpAddr,
}

/// All addresses of `host:port`.
///
/// # Errors
/// `InvalidAddress` when it is no such thing or the name does not resolve.
pub(super) async fn resolve(text: &str, transport: &Transport) -> Result<Vec<SocketAddr>> {
    let invalid = |reason: String| Error::InvalidAddress { value: text.to_owned(), reason };
    check(text)?;
    let found = transport.lookup(text).await.map_err(|e| invalid(e.to_string()))?;
    if found.is_empty() { Err(invalid("the name has no address".into())) } else { Ok(found) }
}

/// Whether `text` has the form of an address; no name is looked up.
///
/// # Errors
/// `InvalidAddress` when it has not.
fn check(text: &str) -> Result<()> {
    let invalid = |reason: String| Error::InvalidAddress { value: text.to_owned(), reason };
    let (_, port) = text.rsplit_once(':').ok_or_else(|| invalid("the port is missing".into()))?;
    port.parse::<u16>().map_err(|_| invalid(format!("{port:?} is no port")))?;
    Ok(())
}

/// Where to listen. Seeds that do not resolve yet are no obstacle: joining retries them.
///
/// # Errors
/// `InvalidAddress` for a bad `addr`, and for seeds that no waiting makes an address.
pub(super) async fn choose(config: &SystemConfig) -> Result<Binding> {
    config.seeds.iter().try_for_each(|seed| check(seed))?;
    #[cfg(feature = "testing")]
    if let Transport::Memory(host) = &config.transport {
        return Ok(Binding { bind: host.addr(), advertise: host.addr().ip() });
    }
    let mut seed = None;
    for text in &config.seeds {
        if let Ok(found) = resolve(text, &config.transport).await {
            seed = found.first().copied();
            break;
        }
    }
    let toward_seed = seed.and_then(interface_to);
    let bind = match &config.addr {
        Some(text) => resolve(text, &config.transport).await?[0],
        None => SocketAddr::new(toward_seed.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0),
    };
    let advertise = if !bind.ip().is_unspecified() {
        bind.ip()
    } else if config.security == Security::Local {
        // Only processes of this host are accepted, and loopback outlives a change of network.
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    } else {
        toward_seed.filter(|ip| !ip.is_loopback()).or_else(outward).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    };
    Ok(Binding { bind, advertise })
}

/// The address this host would use towards `peer`. Connecting a UDP socket sends nothing.
fn interface_to(peer: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// The first address that other hosts could use; those of container bridges come last.
fn outward() -> Option<IpAddr> {
    let mut all = if_addrs::get_if_addrs().ok()?;
    all.retain(|i| !i.is_loopback() && !i.is_link_local());
    all.sort_by_key(|i| {
        let virtual_name = ["docker", "br-", "veth", "virbr", "cni"].iter().any(|p| i.name.starts_with(p));
        (virtual_name, i.ip().is_ipv6())
    });
    all.first().map(if_addrs::Interface::ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bad_addresses_name_the_value_and_the_reason() {
        for (text, word) in
            [("localhost", "port is missing"), ("localhost:http", "no port"), ("no.such.host.invalid:1", "")]
        {
            let error = resolve(text, &Transport::Tcp).await.unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(word), "{error}");
        }
    }

    #[tokio::test]
    async fn without_an_address_the_interface_to_the_seed_is_used() {
        let config = SystemConfig { seeds: vec!["127.0.0.1:8000".into()], ..SystemConfig::default() };
        let chosen = choose(&config).await.unwrap();
        assert_eq!(chosen.bind, "127.0.0.1:0".parse().unwrap());
    }

    #[tokio::test]
    async fn a_wildcard_without_secret_is_known_as_loopback() {
        let config = SystemConfig { addr: Some("0.0.0.0:0".into()), ..SystemConfig::default() };
        let chosen = choose(&config).await.unwrap();
        assert!(chosen.bind.ip().is_unspecified() && chosen.advertise.is_loopback());
    }
}
