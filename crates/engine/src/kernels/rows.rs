//! Views of row-major matrices that several threads fill at once, each its
//! own part.

use super::Buffer;
use super::buffer::Plain;

/// RowView of `pitch` elements each. A view: whoever made it keeps the memory.
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

// SAFETY: a view is only a place; going there is unsafe and says so.
unsafe impl<T: Plain> Send for RowView<T> {}
// SAFETY: likewise.
unsafe impl<T: Plain> Sync for RowView<T> {}

impl<T: Plain> RowView<T> {
    /// A view of a whole buffer.
    pub(crate) fn of(buffer: &mut Buffer<T>, pitch: usize) -> Self {
        Self { first: buffer.as_mut_ptr(), pitch }
    }

    /// A view of a slice.
    pub(crate) fn of_slice(slice: &mut [T], pitch: usize) -> Self {
        Self { first: slice.as_mut_ptr(), pitch }
    }

    /// Elements from one row to the next.
    pub(crate) fn pitch(self) -> usize {
        self.pitch
    }

    /// Where row `row` begins.
    ///
    /// # Safety
    /// The matrix has that row. What is read through the pointer must not be
    /// written by another thread at the time, nor the other way round.
    #[inline(always)]
    pub(crate) unsafe fn row(self, row: usize) -> *mut T {
        // SAFETY: the caller vouches for the row.
        unsafe { self.first.add(row * self.pitch) }
    }
}

/// RowView of activations in the format that the linear layers read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Activations {
    /// As computed.
    F32(RowView<f32>),
    /// Rounded to bf16, for instructions that multiply bf16 by bf16.
    Bf16(RowView<u16>),
}
