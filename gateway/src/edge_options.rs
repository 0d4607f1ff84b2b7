//! The options of the edge, from the sections of the config.

use std::num::NonZeroU32;

use tollgate_config::{ClientFrom, Gateway, SourceLimits};
use tollgate_edge::ListenerOptions;
use tollgate_edge::listener::ConnectionLimitOptions;
use tollgate_edge::source::{Proxies, SourceOptions};

/// Returns the options of the public listener.
pub(crate) fn listener(config: &Gateway) -> ListenerOptions {
    let Gateway { timeouts, connections, http2, deadlines, .. } = config;
    ListenerOptions {
        name: "public",
        connection_limits: ConnectionLimitOptions {
            connections: connections.total as usize,
            per_source: connections.per_source,
            authenticated_per_source: connections.authenticated_per_source,
            new_per_second: positive(connections.new_per_second),
            new_burst: positive(connections.new_burst),
        },
        proxies: proxies(&config.proxies),
        handshakes: connections.handshakes as usize,
        handshake: timeouts.handshake,
        first_byte: timeouts.first_byte,
        head: timeouts.headers,
        idle: timeouts.idle,
        connection_age: timeouts.connection_age,
        // Every request that began on an aged connection may end on it.
        age_grace: deadlines.request + timeouts.drain,
        write_progress: timeouts.write_progress,
        ping_interval: timeouts.ping_interval,
        ping_answer: timeouts.ping_answer,
        drain: timeouts.drain,
        streams: http2.streams,
        pending_accept_resets: http2.pending_accept_resets as usize,
        local_error_resets: http2.local_error_resets as usize,
        // HTTP/2 announces the size in 32 bits, so a larger one becomes the largest.
        header_list: u32::try_from(http2.header_size.0).unwrap_or(u32::MAX),
        cancels: http2.cancels,
        idle_frames: http2.idle_frames_per_second,
    }
}

/// Returns the rate of requests of one network source.
pub(crate) fn sources(config: &SourceLimits) -> SourceOptions {
    let SourceLimits { requests_per_second, request_burst } = *config;
    SourceOptions { per_second: positive(requests_per_second), burst: positive(request_burst) }
}

fn proxies(config: &tollgate_config::Proxies) -> Proxies {
    let tollgate_config::Proxies { trusted, client_from } = config;
    Proxies { trusted: trusted.clone(), proxy_protocol: *client_from == ClientFrom::ProxyV2 }
}

/// Config refuses zero, so the smallest rate stands in for it here.
fn positive(value: u32) -> NonZeroU32 {
    NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edge_defaults_equal_config_defaults() {
        let config = tollgate_config::Config::load(&tollgate_config::Sources::default()).unwrap();
        assert_eq!(sources(&config.gateway().sources), SourceOptions::default());
        assert_eq!(proxies(&config.gateway().proxies), Proxies::default());
    }
}
