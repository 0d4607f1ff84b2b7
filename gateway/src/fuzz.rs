//! What hostile bytes reach in this crate, as functions for the fuzz room that
//! assert what must hold. Nothing else calls them.

pub use crate::auth::fuzz::claims;
pub use tollgate_serving::fuzz::{check_block, check_events};
