//! The sections of the gateway: limits before a caller is authenticated, and limits
//! of each request.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::Network;

use super::{
    AccessLogRequests, ByteSize, ClientFrom, DAY, HttpsUrl, JobLimits, MILLISECOND, Origin, kib,
    loopback, mib, seconds,
};
use crate::read::section;

section! {
    /// The gateway's listeners and their limits.
    pub struct Gateway {
        /// The address and port for callers. Port 0 takes any free port.
        listen: SocketAddr = loopback(8443);
        /// The address and port for admins, probes and metrics.
        admin_listen: SocketAddr = loopback(9443);
    }
    sections {
        /// The TLS certificate.
        tls: Tls;
        /// The timeouts of a connection.
        timeouts: Timeouts;
        /// The limits on connections.
        connections: Connections;
        /// The limits on requests from one source address.
        sources: SourceLimits;
        /// The limits on requests that no plan limits.
        reads: ReadLimits;
        /// Proxies in front of the gateway.
        proxies: Proxies;
        /// The limits within an HTTP/2 connection.
        http2: Http2;
        /// The limits on a request.
        requests: RequestLimits;
        /// The deadlines of a request.
        deadlines: Deadlines;
        /// Requests with an idempotency key.
        idempotency: Idempotency;
        /// Penalties for repeated offences.
        penalties: Penalties;
        /// Web pages that call the API.
        cors: Cors;
        /// The access log.
        access_log: AccessLog;
        /// Messages to another system.
        webhook: Webhook;
        /// Files and batches.
        jobs: JobLimits;
    }
}

section! {
    /// Web pages that call the API in a browser (cross-origin resource sharing). The
    /// admin listener answers no page.
    pub struct Cors {
        /// The origins of these pages, as a browser sends them: a scheme, a host, and a
        /// port unless it is the scheme's own. "*" lets every page call the API; each
        /// call still needs a key. Without this key no page may call the API.
        origins: Vec<Origin> = Vec::new();
    }
}

section! {
    /// The TLS certificate of both listeners. Without one, the gateway creates a
    /// development authority and a certificate under data/tls.
    pub struct Tls {
        /// The certificate chain in PEM, the leaf first.
        certificate: Option<PathBuf> = None;
        /// The certificate's private key in PEM.
        key: Option<PathBuf> = None;
    }
}

section! {
    /// The timeouts of a connection, each from the start of its own phase. The
    /// gateway closes a connection that exceeds one.
    pub struct Timeouts {
        /// The time for the TLS handshake.
        handshake: Duration = seconds(5), MILLISECOND..=DAY;
        /// The time from the handshake to the first byte.
        first_byte: Duration = seconds(5), MILLISECOND..=DAY;
        /// The time from the first byte of a request to the end of its headers.
        headers: Duration = seconds(5), MILLISECOND..=DAY;
        /// The time that a connection may be idle between requests.
        idle: Duration = seconds(60), MILLISECOND..=DAY;
        /// The age of a connection after which it accepts no new requests and
        /// closes.
        connection_age: Duration = seconds(3_600), MILLISECOND..=DAY;
        /// The time in which a request body must bring body_progress_bytes.
        body_progress: Duration = seconds(5), MILLISECOND..=DAY;
        /// The bytes that a request body must bring in every body_progress.
        body_progress_bytes: ByteSize = kib(1), ByteSize(1)..=mib(1);
        /// The time in which a client must take a ready piece of a response. Over
        /// HTTP/2 the response alone ends.
        write_progress: Duration = seconds(15), MILLISECOND..=DAY;
        /// The silence after which the gateway sends an HTTP/2 ping.
        ping_interval: Duration = seconds(15), MILLISECOND..=DAY;
        /// The time that a peer has to answer a ping.
        ping_answer: Duration = seconds(10), MILLISECOND..=DAY;
        /// The time that running requests have after a signal to stop.
        drain: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// The limits on connections. A source is an IPv4 address or an IPv6 /64.
    pub struct Connections {
        /// The largest number of open connections. Beyond seven eighths of it, the
        /// longest-idle connection of the holder with most makes room for a new one.
        total: u32 = 4_096, 1..=1_000_000;
        /// The largest number of open connections from one source that has not
        /// authenticated.
        per_source: u32 = 64, 1..=1_000_000;
        /// The largest number of authenticated connections from one source. At this
        /// number, the tenant with most of them loses an idle one.
        authenticated_per_source: u32 = 4_096, 1..=1_000_000;
        /// The largest number of connections of one key, unless the plan of the key
        /// or of its tenant gives a number.
        per_key: u32 = 512, 1..=1_000_000;
        /// The largest number of connections of one tenant, unless its plan gives a
        /// number.
        per_tenant: u32 = 1_024, 1..=1_000_000;
        /// New connections a second from one source.
        new_per_second: u32 = 20, 1..=1_000_000;
        /// New connections from one source in a burst.
        new_burst: u32 = 100, 1..=1_000_000;
        /// The largest number of TLS handshakes at the same time, over all sources.
        handshakes: u32 = 256, 1..=1_000_000;
    }
}

section! {
    /// The limits on requests from one source, over all its connections and with
    /// any credentials. A source is an IPv4 address or an IPv6 /64.
    pub struct SourceLimits {
        /// Requests a second from one source.
        requests_per_second: u32 = 1_000, 1..=1_000_000;
        /// Requests from one source in a burst.
        request_burst: u32 = 2_000, 1..=1_000_000;
    }
}

section! {
    /// The limits on read-only requests from one caller, such as /v1/models and
    /// /v1/usage, which no plan limits, and on requests of admins.
    pub struct ReadLimits {
        /// Requests a second with one API key or token.
        requests_per_second: u32 = 100, 1..=1_000_000;
        /// Requests with one API key or token in a burst.
        request_burst: u32 = 1_000, 1..=1_000_000;
    }
}

section! {
    /// Proxies in front of the gateway. The gateway accepts a client address only
    /// from a proxy that is listed here.
    pub struct Proxies {
        /// The networks of the proxies. A proxy's connections count against the
        /// total limit only, and the client that the proxy names is the source.
        trusted: Vec<Network> = Vec::new();
        /// The way in which proxies name the client: "x-forwarded-for" in each
        /// request, or "proxy-v2" for the PROXY protocol before TLS. A proxy's
        /// connection without a PROXY header is closed.
        client_from: ClientFrom = ClientFrom::XForwardedFor;
    }
}

section! {
    /// The limits within an HTTP/2 connection.
    pub struct Http2 {
        /// The largest number of concurrent streams.
        streams: u32 = 100, 1..=10_000;
        /// The largest number of streams that were reset before the gateway
        /// accepted them.
        pending_accept_resets: u32 = 20, 1..=10_000;
        /// The largest number of streams that the gateway reset because of the
        /// peer's errors.
        local_error_resets: u32 = 64, 1..=10_000;
        /// The largest size of all headers of a request.
        header_size: ByteSize = kib(16), kib(1)..=mib(1);
        /// The number of streams that the peer may cancel. After that the
        /// connection is closed.
        cancels: u32 = 200, 1..=1_000_000;
        /// The number of frames a second that carry no request data (SETTINGS,
        /// PING, PRIORITY, empty DATA and similar), with a burst of ten seconds.
        /// Beyond that the connection is closed.
        idle_frames_per_second: u32 = 100, 1..=1_000_000;
    }
}

section! {
    /// The limits on a request.
    pub struct RequestLimits {
        /// The largest body of a chat or completion request.
        body: ByteSize = mib(2), kib(1)..=mib(256);
        /// The memory for the bodies of one tenant that arrive or wait to be parsed.
        /// The tenants of a pool without plans of their own have it together, and each
        /// at most half of it. A smaller value than the largest body counts as the
        /// largest body.
        body_memory_per_tenant: ByteSize = mib(32), kib(64)..=mib(65_536);
        /// The memory for such bodies of all tenants. Beyond it a tenant, or a pool of
        /// such tenants, still has 256 KiB. A smaller value than body_memory_per_tenant counts as that.
        body_memory: ByteSize = mib(256), kib(64)..=mib(1_048_576);
        /// The largest nesting depth of JSON.
        json_depth: u32 = 32, 4..=128;
        /// The largest number of messages in a chat.
        messages: u32 = 2_048, 1..=65_536;
        /// The largest number of choices (n).
        choices: u32 = 8, 1..=128;
        /// The largest number of candidates (best_of).
        best_of: u32 = 2, 1..=128;
        /// The largest number of prompts in a completion.
        prompts: u32 = 16, 1..=2_048;
        /// The largest number of stop strings.
        stop: u32 = 16, 1..=64;
        /// The largest size of a stop string.
        stop_size: ByteSize = ByteSize(256), ByteSize(1)..=kib(16);
        /// The largest number of alternatives for a token (top_logprobs).
        top_logprobs: u32 = 20, 1..=20;
        /// The largest number of entries in logit_bias.
        logit_bias: u32 = 300, 1..=1_024;
        /// The token limit of an answer if the request gives none. The model's
        /// context is a limit, too.
        default_max_tokens: u32 = 1_024, 1..=1_000_000;
    }
}

section! {
    /// Requests with an Idempotency-Key header. A repeated request gets the first
    /// answer and does not run again.
    pub struct Idempotency {
        /// The time for which a key is remembered.
        kept: Duration = DAY, seconds(60)..=DAY * 7;
        /// The largest number of remembered keys of one tenant. Further requests
        /// with a new key are refused; requests without a key are not affected.
        keys_per_tenant: u32 = 100_000, 1..=10_000_000;
        /// The memory for answers to repeat, over all tenants. The oldest answers
        /// are dropped first. Answers are never written to disk.
        answers: ByteSize = mib(64), ByteSize(0)..=mib(65_536);
        /// The largest answer that is remembered.
        largest_answer: ByteSize = mib(1), ByteSize(0)..=mib(1_024);
    }
}

section! {
    /// The deadlines of a request.
    pub struct Deadlines {
        /// The time that a request may wait to run.
        queue: Duration = seconds(30), MILLISECOND..=DAY;
        /// The time from a request's headers to the last byte of its answer.
        request: Duration = seconds(600), MILLISECOND..=DAY;
        /// The time after that for which the limits of a lost request stay
        /// reserved.
        hold_grace: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// Penalties for repeated offences: a wait that decays by itself. An admin
    /// lists and lifts penalties with `tollgate penalties`.
    pub struct Penalties {
        /// The number of clients of one tenant that may be waiting for a retry at
        /// the same time. More refusals than this many clients can cause come from
        /// clients that ignore retry-after.
        refused_clients: u32 = 1_000, 1..=1_000_000;
        /// The device time that a tenant may waste in a minute: that of requests which
        /// their clients leave, without the time of content that they have received.
        wasted_time_per_minute: Duration = seconds(15), MILLISECOND..=DAY;
        /// The number of failed authentications a minute from one source. Its valid
        /// credentials keep working.
        failed_authentications_per_minute: u32 = 60, 1..=1_000_000;
        /// The longest time that a penalty lasts after the last offence.
        longest: Duration = seconds(60), seconds(1)..=seconds(3_600);
    }
}

section! {
    /// The access log: a line for a request in the log of the gateway, with ids and
    /// figures, and without prompts, answers and secrets.
    pub struct AccessLog {
        /// The requests that have a line: "off", "refusals" for those that were not
        /// answered, or "all".
        requests: AccessLogRequests = AccessLogRequests::Off;
        /// The largest number of lines a second. The first line after this many says
        /// how many requests had none.
        lines_per_second: u32 = 100, 1..=100_000;
    }
}

section! {
    /// Messages to another system when a part of a cap or of a budget is spent: a POST
    /// with JSON, signed as Standard Webhooks says.
    pub struct Webhook {
        /// The https address of the receiver. Without it no message is sent.
        url: Option<HttpsUrl> = None;
        /// The file with the secret that signs messages: whsec_ and the base64 of 24 to
        /// 64 bytes. A receiver needs the same secret.
        secret: Option<PathBuf> = None;
        /// A PEM file with the certificate authorities for url. The default is the
        /// system's authorities.
        ca: Option<PathBuf> = None;
        /// The networks that url may lead to, in addition to public addresses: an
        /// address of a private network is refused unless it is listed here.
        allowed_networks: Vec<Network> = Vec::new();
        /// The time for one attempt to deliver a message.
        timeout: Duration = seconds(10), Duration::from_millis(100)..=seconds(60);
        /// The time for which a message is sent again while the receiver does not
        /// answer 2xx. The waits grow from 1 s to 5 min.
        retry_for: Duration = seconds(3_600), Duration::ZERO..=DAY;
    }
}
