//! Fuzz targets for parsers of untrusted bytes in this crate. Each function
//! asserts what must hold; only the fuzz crate calls them.

pub use crate::api::jobs::form::fuzz::upload_form;
pub use crate::auth::fuzz::claims;
pub use tollgate_jobs::fuzz::{batch_lines, count_mistakes};
pub use tollgate_serving::fuzz::{check_block, check_events};
