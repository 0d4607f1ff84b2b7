//! An NVIDIA GPU as a device: so far its kernels, which run in tests under
//! emulation; the backend over them is being built.

pub mod kernels;
