//! Memory for weights, cache and activations: zeroed, page-aligned, taken
//! from the system in one piece and touched only where it is used.

use std::io;
use std::marker::PhantomData;

use memmap2::MmapMut;

/// Numbers for which any bits are a value and all zeros are 0.
///
/// # Safety
/// The type has no padding, no invalid bit pattern, no drop, and needs no
/// more than 64-byte alignment.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}

/// A fixed number of elements, zero at first.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    map: MmapMut,
    length: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Takes the memory from the system.
    pub(crate) fn zeroed(length: usize) -> io::Result<Self> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = MmapMut::map_anon(bytes.max(1))?;
        Ok(Self { map, length, element: PhantomData })
    }

    /// The same, for memory that will all be filled and then read in streams:
    /// in large pages, so that a core does not miss its TLB.
    pub(crate) fn zeroed_for_streams(length: usize) -> io::Result<Self> {
        let buffer = Self::zeroed(length)?;
        // A system that has no large pages is only slower.
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
        // SAFETY: the map is page-aligned, holds `length` elements, and any
        // bits are a value of a `Plain` type.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        let length = self.length;
        // SAFETY: as in `as_slice`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), length) }
    }
}
