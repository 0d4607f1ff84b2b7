//! Views of row-major matrices. Several threads can fill one at the same time, each its
//! own part.

use super::Buffer;
use super::buffer::Plain;

/// A view of rows of `pitch` elements each. The owner of the memory must keep it alive.
#[derive(Debug)]
pub(crate) struct RowView<T> {
    first: *mut T,
    pitch: usize,
}

impl<T> Clone for RowView<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RowView<T> {}

// SAFETY: a view is only a pointer; every access through it is unsafe and states its
// conditions.
unsafe impl<T: Plain> Send for RowView<T> {}
// SAFETY: the same reason holds for shared views.
unsafe impl<T: Plain> Sync for RowView<T> {}

impl<T: Plain> RowView<T> {
    /// Returns a view of a whole buffer.
    pub(crate) fn of(buffer: &mut Buffer<T>, pitch: usize) -> Self {
        Self { first: buffer.as_mut_ptr(), pitch }
    }

    /// Returns a view of a slice.
    pub(crate) fn of_slice(slice: &mut [T], pitch: usize) -> Self {
        Self { first: slice.as_mut_ptr(), pitch }
    }

    /// Returns the elements from one row to the next.
    pub(crate) fn pitch(self) -> usize {
        self.pitch
    }

    /// Returns the address of row `row`.
    ///
    /// # Safety
    /// The matrix must have that row. A thread must not read through the pointer what
    /// another thread writes at the same time.
    #[inline(always)]
    pub(crate) unsafe fn row(self, row: usize) -> *mut T {
        // SAFETY: the caller vouches for the row.
        unsafe { self.first.add(row * self.pitch) }
    }
}

/// Rows of activations in the format that the linear layers read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Activations {
    /// Exactly as computed, in f32.
    F32(RowView<f32>),
    /// Rounded to bf16, for instructions that multiply bf16 by bf16.
    Bf16(RowView<u16>),
}
