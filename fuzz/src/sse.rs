//! The load generator's reader of event streams: however the network cuts
//! them, the events are the same.

use tollgate_loadtest::sse::Events;

pub(crate) fn events(data: &[u8]) {
    let Some((&cut, stream)) = data.split_first() else { return };
    let whole = Events::default().push(stream);
    let mut pieces = Events::default();
    let mut found = Vec::new();
    let size = usize::from(cut) + 1;
    for piece in stream.chunks(size) {
        match pieces.push(piece) {
            Ok(payloads) => found.extend(payloads),
            Err(_) => {
                assert!(whole.is_err(), "too long in pieces and not at once");
                return;
            }
        }
    }
    if let Ok(whole) = whole {
        assert_eq!(found, whole, "cut into {size}");
        assert!(whole.iter().all(|payload| !payload.contains(&b'\n')));
    }
}
