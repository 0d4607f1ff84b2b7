//! The front door: what anybody may do before they are known, and what each
//! request may ask for.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::Network;

use super::{ByteSize, ClientFrom, DAY, MILLISECOND, kib, loopback, mib, seconds};
use crate::read::section;

section! {
    /// The front door.
    pub struct Gateway {
        /// Where callers connect. Port 0 takes any free one.
        listen: SocketAddr = loopback(8443);
        /// Where admins, probes and metrics connect.
        admin_listen: SocketAddr = loopback(9443);
    }
    sections {
        /// The certificate.
        tls: Tls;
        /// Deadlines of a connection.
        timeouts: Timeouts;
        /// Bounds on connections.
        connections: Connections;
        /// Bounds on what one source asks.
        sources: SourceLimits;
        /// Proxies before the front door.
        proxies: Proxies;
        /// Bounds within an HTTP/2 connection.
        http2: Http2;
        /// Bounds on a request.
        requests: RequestLimits;
        /// Deadlines of a request.
        deadlines: Deadlines;
        /// Requests that are sent again.
        idempotency: Idempotency;
        /// What repeated offences earn.
        penalties: Penalties;
    }
}

section! {
    /// The certificate of both listeners. Without one, a development authority
    /// and certificate are made under data/tls.
    pub struct Tls {
        /// The chain in PEM, the leaf first.
        certificate: Option<PathBuf> = None;
        /// Its private key in PEM.
        key: Option<PathBuf> = None;
    }
}

section! {
    /// Deadlines of a connection, each from the start of its own phase.
    pub struct Timeouts {
        /// The TLS handshake.
        handshake: Duration = seconds(5), MILLISECOND..=DAY;
        /// From the handshake to the first byte.
        first_byte: Duration = seconds(5), MILLISECOND..=DAY;
        /// From the first byte of a request to the end of its headers.
        headers: Duration = seconds(5), MILLISECOND..=DAY;
        /// A connection between requests.
        idle: Duration = seconds(60), MILLISECOND..=DAY;
        /// A connection's whole life; then it is drained.
        connection_age: Duration = seconds(3_600), MILLISECOND..=DAY;
        /// A request body must bring body_progress_bytes in every such span.
        body_progress: Duration = seconds(5), MILLISECOND..=DAY;
        /// See body_progress.
        body_progress_bytes: ByteSize = kib(1), ByteSize(1)..=mib(1);
        /// A response must be taken up, in part at least, in every such span.
        write_progress: Duration = seconds(15), MILLISECOND..=DAY;
        /// An HTTP/2 peer that was silent for so long is asked for a sign.
        ping_interval: Duration = seconds(15), MILLISECOND..=DAY;
        /// How long it may take to give one.
        ping_answer: Duration = seconds(10), MILLISECOND..=DAY;
        /// How long requests may go on after a signal to stop.
        drain: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// Bounds on connections. A source is an IPv4 address or an IPv6 /64.
    pub struct Connections {
        /// Open at once.
        total: u32 = 4_096, 1..=1_000_000;
        /// Open at once from one source that has not authenticated.
        per_source: u32 = 64, 1..=1_000_000;
        /// New ones a second from one source.
        new_per_second: u32 = 20, 1..=1_000_000;
        /// New ones at once from one source.
        new_burst: u32 = 100, 1..=1_000_000;
        /// Handshakes in flight over all sources.
        handshakes: u32 = 256, 1..=1_000_000;
    }
}

section! {
    /// Bounds on what one source asks, over all its connections and whoever it
    /// says it is. A source is an IPv4 address or an IPv6 /64.
    pub struct SourceLimits {
        /// Requests a second.
        requests_per_second: u32 = 1_000, 1..=1_000_000;
        /// Requests at once.
        request_burst: u32 = 2_000, 1..=1_000_000;
    }
}

section! {
    /// Proxies before the front door. Nobody's word about the client is taken
    /// unless they are named here.
    pub struct Proxies {
        /// Their networks. Their connections count against the total alone,
        /// and the client that they name is the source.
        trusted: Vec<Network> = Vec::new();
        /// How they name the client: "x-forwarded-for" in each request, or
        /// "proxy-v2", the PROXY protocol before TLS; a connection of theirs
        /// without it is closed.
        client_from: ClientFrom = ClientFrom::XForwardedFor;
    }
}

section! {
    /// Bounds within an HTTP/2 connection.
    pub struct Http2 {
        /// Streams at once.
        streams: u32 = 100, 1..=10_000;
        /// Streams reset before they were accepted.
        pending_accept_resets: u32 = 20, 1..=10_000;
        /// Streams that were reset for the peer's errors.
        local_error_resets: u32 = 64, 1..=10_000;
        /// All headers of a request.
        header_size: ByteSize = kib(16), kib(1)..=mib(1);
        /// Streams that the peer may cancel; then the connection is closed.
        cancels: u32 = 200, 1..=1_000_000;
        /// Frames a second that ask for nothing (SETTINGS, PING, PRIORITY,
        /// empty DATA and the like), ten seconds' worth at once; beyond, the
        /// connection is closed.
        idle_frames_per_second: u32 = 100, 1..=1_000_000;
    }
}

section! {
    /// Bounds on a request.
    pub struct RequestLimits {
        /// The body of a chat or completion request.
        body: ByteSize = mib(2), kib(1)..=mib(256);
        /// How deep JSON may nest.
        json_depth: u32 = 32, 4..=128;
        /// Messages of a chat.
        messages: u32 = 2_048, 1..=65_536;
        /// Choices of an answer (n).
        choices: u32 = 8, 1..=128;
        /// Candidates of a completion (best_of).
        best_of: u32 = 2, 1..=128;
        /// Prompts of a completion.
        prompts: u32 = 16, 1..=2_048;
        /// Stop strings.
        stop: u32 = 4, 1..=64;
        /// One stop string.
        stop_size: ByteSize = ByteSize(256), ByteSize(1)..=kib(16);
        /// Alternatives reported for a token (top_logprobs).
        top_logprobs: u32 = 20, 1..=20;
        /// Entries of logit_bias.
        logit_bias: u32 = 300, 1..=1_024;
        /// Tokens of an answer where the request says nothing; the model's
        /// context bounds it too.
        default_max_tokens: u32 = 1_024, 1..=1_000_000;
    }
}

section! {
    /// Requests that bring an Idempotency-Key: what is sent again is not run
    /// again.
    pub struct Idempotency {
        /// How long a key stands for its request.
        kept: Duration = DAY, seconds(60)..=DAY * 7;
        /// Keys of one tenant within that time; requests beyond it are refused
        /// unless they bring none.
        keys_per_tenant: u32 = 100_000, 1..=10_000_000;
        /// Memory for answers to give again, over all tenants; the oldest go
        /// first. They are never written to disk.
        answers: ByteSize = mib(64), ByteSize(0)..=mib(65_536);
        /// The longest answer that is kept.
        largest_answer: ByteSize = mib(1), ByteSize(0)..=mib(1_024);
    }
}

section! {
    /// Deadlines of a request.
    pub struct Deadlines {
        /// Waiting for a place to run.
        queue: Duration = seconds(30), MILLISECOND..=DAY;
        /// From its headers to its last byte.
        request: Duration = seconds(600), MILLISECOND..=DAY;
        /// How long after that a lost request's limits are held.
        hold_grace: Duration = seconds(30), MILLISECOND..=DAY;
    }
}

section! {
    /// What repeated offences earn: a wait that decays by itself. An admin sees
    /// it and lifts it by tollgate penalties.
    pub struct Penalties {
        /// Clients of one tenant that may be waiting to come back as they were
        /// told to. More refusals than so many could cause come from clients
        /// that do not wait.
        refused_clients: u32 = 1_000, 1..=1_000_000;
        /// Requests that a tenant may cancel in a minute while they wait or
        /// run.
        cancels_per_minute: u32 = 60, 1..=1_000_000;
        /// Credentials that one source may show in a minute and that do not
        /// authenticate. Its good ones are served all the same.
        failed_authentications_per_minute: u32 = 60, 1..=1_000_000;
        /// No penalty lasts longer after the last offence.
        longest: Duration = seconds(60), seconds(1)..=seconds(3_600);
    }
}
