//! Memory for weights, cache and activations. It is zeroed and page-aligned, and the
//! system provides its pages on first use.

use std::io;
use std::marker::PhantomData;

use memmap2::MmapMut;

/// A number type for which any bits are a value and all zeros are 0.
///
/// # Safety
/// The type must have no padding, no invalid bit pattern and no drop, and must need no
/// more than 64-byte alignment.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}

/// A fixed number of elements, initially zero.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    map: MmapMut,
    length: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Takes the memory from the system.
    ///
    /// # Errors
    /// The system's error, or `OutOfMemory` if the size overflows.
    pub(crate) fn zeroed(length: usize) -> io::Result<Self> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // A map of 0 bytes is an error of the system.
        let map = MmapMut::map_anon(bytes.max(1))?;
        Ok(Self { map, length, element: PhantomData })
    }

    /// Takes memory that will be filled completely and then read in streams. Large
    /// pages are requested for it, which avoids TLB misses.
    ///
    /// # Errors
    /// The errors of [`Self::zeroed`].
    pub(crate) fn zeroed_for_streams(length: usize) -> io::Result<Self> {
        let buffer = Self::zeroed(length)?;
        // A system without large pages is only slower.
        #[cfg(target_os = "linux")]
        let _ = buffer.map.advise(memmap2::Advice::HugePage);
        Ok(buffer)
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.map.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.map.as_mut_ptr().cast()
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: the map is page-aligned, holds `length` elements, and any bits are a
        // value of a `Plain` type.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        let length = self.length;
        // SAFETY: the same conditions hold as in `as_slice`, and `self` is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), length) }
    }
}
