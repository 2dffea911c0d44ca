//! Addresses: from what a user writes to what a node binds and tells others (M6).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use super::config::{Security, SystemConfig};
use super::seed::Seed;
use crate::error::{Error, Result};
use crate::net::transport::Transport;
use crate::shown::shown;

/// Longest name that DNS has, in characters as it is written (RFC 1035 section 2.3.4, less the length bytes).
const MAX_HOST: usize = 253;

/// What to bind, and what to tell others.
pub(super) struct Binding {
    pub(super) bind: SocketAddr,
    pub(super) advertise: IpAddr,
    /// `None` = the port that it listens on.
    pub(super) port: Option<u16>,
}

/// All addresses of `host:port`.
///
/// # Errors
/// `InvalidAddress` when it is no such thing or the name does not resolve.
pub(super) async fn resolve(text: &str, transport: &Transport) -> Result<Vec<SocketAddr>> {
    let invalid = |reason: String| Error::InvalidAddress { value: text.to_owned(), reason };
    parts(text).map_err(invalid)?;
    let found = transport.lookup(text).await.map_err(|e| invalid(e.to_string()))?;
    if found.is_empty() { Err(invalid("the name has no address".into())) } else { Ok(found) }
}

/// Host and port of `host:port`, the host without the brackets of IPv6; no name is looked up. The error is the reason.
pub(super) fn parts(text: &str) -> std::result::Result<(&str, u16), String> {
    let (host, port) = text.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')).ok_or("the port is missing")?;
    if host.len() > MAX_HOST {
        return Err(format!("a host name has {MAX_HOST} characters at most"));
    }
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    if bracketed.is_none() && host.contains(':') {
        if !host.contains("::") && host.matches(':').count() < 7 {
            return Err("it has more than one colon".to_owned());
        }
        return Err(format!("an IPv6 address stands in brackets, as in [{}]:{port}", host.trim_matches(['[', ']'])));
    }
    let port = port.parse::<u16>().map_err(|_| format!("{} is no port", shown(port)))?;
    let host = bracketed.unwrap_or(host);
    if host.is_empty() {
        return Err("the host is missing".to_owned());
    }
    if host.contains(char::is_whitespace) {
        return Err("there is white space in the host".to_owned());
    }
    if host.contains(char::is_control) {
        return Err("there is a control character in the host".to_owned());
    }
    let bare = host.split_once('%').map_or(host, |(bare, _)| bare);
    match bare.parse::<Ipv6Addr>() {
        // It would mean another machine on each link and on each host that hears of it.
        Ok(ip) if ip.is_unicast_link_local() => Err("a link-local address means something on one link only; use a \
             global or unique local address, or a host name"
            .to_owned()),
        Err(_) if bracketed.is_some() => Err(format!("{host:?} is no IPv6 address")),
        _ if bare != host => Err(format!("{host:?} has a scope, which only link-local addresses have")),
        _ => Ok((host, port)),
    }
}

/// Where to listen, and what to tell others. Seeds that do not resolve yet are no obstacle: joining retries them.
///
/// # Errors
/// `InvalidAddress` for a bad `addr` or `advertise`.
pub(super) async fn choose(config: &SystemConfig, seeds: &[Seed]) -> Result<Binding> {
    #[cfg(feature = "testing")]
    if let Transport::Memory(host) = &config.transport {
        return Ok(Binding { bind: host.addr(), advertise: host.addr().ip(), port: None });
    }
    let mut seed = None;
    for one in seeds {
        if let Ok(found) = one.resolve(&config.transport).await {
            seed = found.first().copied();
            break;
        }
    }
    let toward_seed = seed.and_then(interface_to);
    let bind = match &config.addr {
        Some(text) => resolve(text, &config.transport).await?[0],
        None => SocketAddr::new(toward_seed.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0),
    };
    if let Some(text) = &config.advertise {
        return advertised(text, bind, &config.transport).await;
    }
    let advertise = if bind.ip().is_unspecified() {
        known_as(bind.ip(), toward_seed, config.security == Security::Local)
    } else {
        bind.ip()
    };
    Ok(Binding { bind, advertise, port: None })
}

/// What a node says of itself that was told what to say: the first address of the name, in the family it listens on if
/// there is one. Port 0 stands for the port that it listens on.
async fn advertised(text: &str, bind: SocketAddr, transport: &Transport) -> Result<Binding> {
    let found = resolve(text, transport).await?;
    let told = found.iter().find(|addr| addr.is_ipv4() == bind.is_ipv4()).unwrap_or(&found[0]);
    if told.ip().is_unspecified() || told.ip().is_multicast() {
        let reason = "nobody can connect to it; give the address that other nodes use".to_owned();
        return Err(Error::InvalidAddress { value: text.to_owned(), reason });
    }
    Ok(Binding { bind, advertise: told.ip(), port: (told.port() != 0).then_some(told.port()) })
}

/// What a node is known as that listens on every interface, of one family where `wildcard` is 0.0.0.0.
fn known_as(wildcard: IpAddr, toward_seed: Option<IpAddr>, only_this_host: bool) -> IpAddr {
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    if only_this_host {
        // Only processes of this host are accepted, and loopback outlives a change of network.
        return loopback;
    }
    let heard = |ip: &IpAddr| ip.is_ipv4() || wildcard.is_ipv6();
    toward_seed.filter(|ip| !ip.is_loopback() && heard(ip)).or_else(|| outward(heard)).unwrap_or(loopback)
}

/// The address this host would use towards `peer`. Connecting a UDP socket sends nothing.
fn interface_to(peer: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// The address that other hosts most likely use, of those that pass: that of the default route, else the first one that is
/// no container bridge's, else any.
fn outward(pass: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    // Addresses of documentation (RFC 5737, RFC 3849) are in no network, so the kernel answers with its default route.
    let elsewhere =
        [SocketAddr::from(([192, 0, 2, 1], 9)), SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9))];
    let routed = elsewhere.into_iter().filter_map(interface_to).find(|ip| !ip.is_loopback() && pass(ip));
    routed.or_else(|| {
        let mut all = if_addrs::get_if_addrs().ok()?;
        all.retain(|i| !i.is_loopback() && !i.is_link_local() && pass(&i.ip()));
        all.sort_by_key(|i| {
            // What stands on the loopback interface is reached through another one, if at all.
            let last =
                i.name == "lo" || ["docker", "br-", "veth", "virbr", "cni"].iter().any(|p| i.name.starts_with(p));
            (last, i.ip().is_ipv6())
        });
        all.first().map(if_addrs::Interface::ip)
    })
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

    async fn chosen(config: SystemConfig) -> Binding {
        let seeds: Vec<Seed> = config.seeds.iter().map(|text| Seed::parse(text).unwrap()).collect();
        choose(&config, &seeds).await.unwrap()
    }

    #[tokio::test]
    async fn test_m6_without_an_address_the_interface_to_the_seed_is_used() {
        for (seed, bind) in [("127.0.0.1:8000", "127.0.0.1:0"), ("[::1]:8000", "[::1]:0")] {
            let config = SystemConfig { seeds: vec![seed.into()], ..SystemConfig::default() };
            assert_eq!(chosen(config).await.bind, bind.parse().unwrap());
        }
    }

    #[tokio::test]
    async fn test_m6_a_wildcard_without_secret_is_known_as_loopback() {
        for addr in ["0.0.0.0:0", "[::]:0"] {
            let config = SystemConfig { addr: Some(addr.into()), ..SystemConfig::default() };
            let chosen = chosen(config).await;
            assert!(chosen.bind.ip().is_unspecified() && chosen.advertise.is_loopback());
        }
    }

    #[test]
    fn test_m6_a_wildcard_is_known_as_an_address_that_it_hears() {
        let (v4, v6) = (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED));
        let toward: IpAddr = "2001:db8::7".parse().unwrap();
        assert_eq!(known_as(v6, Some(toward), false), toward);
        assert!(known_as(v4, Some(toward), false).is_ipv4());
    }

    #[tokio::test]
    async fn test_m6_what_is_advertised_is_what_was_asked_for() {
        let told = |text: &str| SystemConfig {
            addr: Some("0.0.0.0:8000".into()),
            advertise: Some(text.into()),
            ..SystemConfig::default()
        };
        let nat = chosen(told("203.0.113.5:30080")).await;
        assert_eq!((nat.advertise.to_string().as_str(), nat.port), ("203.0.113.5", Some(30080)));
        let same = chosen(told("[2001:db8::5]:0")).await;
        assert_eq!((same.advertise.to_string().as_str(), same.port), ("2001:db8::5", None));
        for (text, word) in [("0.0.0.0:80", "nobody can connect"), ("[fe80::1]:80", "link-local"), ("x", "port")] {
            let error = choose(&told(text), &[]).await.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(word), "{error}");
        }
    }
}
