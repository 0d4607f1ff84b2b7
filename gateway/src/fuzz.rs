//! Fuzz targets for parsers of untrusted bytes in this crate. Each function
//! asserts what must hold; only the fuzz crate calls them.

pub use crate::auth::fuzz::claims;
pub use tollgate_serving::fuzz::{check_block, check_events};
