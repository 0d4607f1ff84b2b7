//! A relay of TCP connections for tests: it can be slow or say nothing, and can lead to another
//! server.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A port of loopback whose connections lead to another one.
pub struct Relay {
    port: u16,
    state: Arc<State>,
}

struct State {
    way: Mutex<Way>,
    is_over: AtomicBool,
}

/// The way of the bytes.
#[derive(Clone, Copy)]
struct Way {
    to: u16,
    passing: Passing,
    /// Counts the changes after which older connections are closed.
    generation: u64,
}

/// The manner in which bytes pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// At once.
    Open,
    /// After this time, in each direction.
    Slow(Duration),
    /// Not at all, and connections stay open.
    Silent,
}

/// The time between two looks at the state.
const LOOK: Duration = Duration::from_millis(10);

impl Relay {
    /// Makes a relay to a port of loopback.
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let own = listener.local_addr().expect("an address").port();
        let way = Way { to: port, passing: Passing::Open, generation: 0 };
        let state = Arc::new(State { way: Mutex::new(way), is_over: AtomicBool::new(false) });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.is_over.load(Ordering::Relaxed) {
                    return;
                }
                relay(&client, &shared);
            }
        });
        Self { port: own, state }
    }

    /// Returns `url` with the port of the relay in place of `port`.
    pub fn url(&self, url: &str, port: u16) -> String {
        url.replace(&format!(":{port}"), &format!(":{}", self.port))
    }

    /// Changes the manner in which bytes pass, also for open connections.
    pub fn pass(&self, passing: Passing) {
        self.state.lock().passing = passing;
    }

    /// Closes all connections, and leads new ones to another port.
    pub fn lead_to(&self, port: u16) {
        let mut way = self.state.lock();
        way.to = port;
        way.generation += 1;
    }
}

impl State {
    fn lock(&self) -> std::sync::MutexGuard<'_, Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        self.state.lock().generation += 1;
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Begins the relay of one connection, in two threads.
fn relay(client: &TcpStream, state: &Arc<State>) {
    let way = *state.lock();
    let Ok(server) = TcpStream::connect(("127.0.0.1", way.to)) else { return };
    let copies = [(client, &server), (&server, client)];
    for (from, to) in copies {
        // Small packets at once: both protocols ask and answer.
        let _ = (from.set_nodelay(true), from.set_read_timeout(Some(LOOK)));
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
        let state = Arc::clone(state);
        thread::spawn(move || {
            copy(&from, &to, &state, way.generation);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }
}

/// Copies until one side ends or the connection is cut.
#[expect(clippy::disallowed_methods, reason = "the relay holds bytes back for a time")]
fn copy(mut from: &TcpStream, mut to: &TcpStream, state: &State, generation: u64) {
    let mut buffer = vec![0; 64 * 1_024];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) if is_timeout(&error) => 0,
            Err(_) => return,
        };
        let came = Instant::now();
        loop {
            let way = *state.lock();
            if way.generation != generation {
                return;
            }
            match way.passing {
                Passing::Slow(time) if count > 0 && came.elapsed() < time => {}
                Passing::Silent if count > 0 => {}
                _ => break,
            }
            thread::sleep(LOOK);
        }
        if to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}
