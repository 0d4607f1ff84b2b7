//! The load generator's reader of event streams: the events do not depend on the
//! pieces in which the network delivers them.

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
                assert!(whole.is_err(), "refused in pieces and accepted as a whole");
                return;
            }
        }
    }
    if let Ok(whole) = whole {
        assert_eq!(found, whole, "cut into {size}");
        assert!(whole.iter().all(|payload| !payload.contains(&b'\n')));
    }
}
