//! Weight matrices in panels.
//!
//! A panel holds sixteen rows (outputs) of a matrix, column by column: `[column][16]`
//! for F32 and F16, `[column / 2][16][2]` for bf16. Both the pairwise dot products and
//! the matrix tiles read this layout. Rows and columns are padded with zeros and panels
//! to an even number, so that kernels need no code for edges. Each panel is read as one
//! stream.

use std::io;

use super::{Buffer, COLUMN_STEP, LANES};
use crate::weights::{Element, Tensor};

/// A packed weight matrix.
#[derive(Debug)]
pub(crate) struct Packed {
    data: PackedData,
    rows: usize,
    columns: usize,
}

#[derive(Debug)]
pub(super) enum PackedData {
    F32(Buffer<f32>),
    F16(Buffer<u16>),
    /// Pairs of columns, the even column in the lower half.
    Bf16(Buffer<u32>),
}

/// The element type of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedFormat {
    F32,
    F16,
    Bf16,
}

/// The source of one row of a packed matrix.
#[derive(Clone, Copy)]
pub(crate) struct RowSource<'a> {
    /// A row-major tensor with the matrix's columns.
    pub(crate) tensor: Tensor<'a>,
    /// Index of the row in the tensor.
    pub(crate) row: usize,
}

impl PackedFormat {
    /// Returns the format that keeps elements of all these types exactly.
    pub(crate) fn holding(elements: impl IntoIterator<Item = Element>) -> Self {
        let format = |element| match element {
            Element::F32 => Self::F32,
            Element::F16 => Self::F16,
            Element::Bf16 => Self::Bf16,
        };
        let mut formats = elements.into_iter().map(format);
        let first = formats.next().unwrap_or(Self::F32);
        // A mixed model becomes f32, the only format that holds all types exactly.
        if formats.all(|other| other == first) { first } else { Self::F32 }
    }
}

impl Packed {
    /// Creates a matrix of zeros. Its shape is its rows, which are outputs, and its columns,
    /// which are inputs.
    ///
    /// # Errors
    /// The system's error if it refuses the memory.
    pub(crate) fn zeroed(format: PackedFormat, shape: [usize; 2]) -> io::Result<Self> {
        let [rows, columns] = shape;
        // The padding stays zero, so it adds nothing to any sum.
        let elements = padded_rows(rows) * padded_columns(columns);
        let data = match format {
            PackedFormat::F32 => PackedData::F32(Buffer::zeroed_for_streams(elements)?),
            PackedFormat::F16 => PackedData::F16(Buffer::zeroed_for_streams(elements)?),
            // Two bf16 elements share a word.
            PackedFormat::Bf16 => PackedData::Bf16(Buffer::zeroed_for_streams(elements / 2)?),
        };
        Ok(Self { data, rows, columns })
    }

    /// Returns the number of outputs, without padding.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of inputs with padding, which is also the length of a row of
    /// activations.
    pub(crate) fn padded_columns(&self) -> usize {
        padded_columns(self.columns)
    }

    /// Returns the number of pairs of panels.
    pub(crate) fn pairs(&self) -> usize {
        padded_rows(self.rows) / (2 * LANES)
    }

    /// Returns the bytes of one pair of panels.
    pub(crate) fn pair_bytes(&self) -> usize {
        let element = if matches!(self.data, PackedData::F32(_)) { 4 } else { 2 };
        2 * LANES * self.padded_columns() * element
    }

    pub(super) fn data(&self) -> &PackedData {
        &self.data
    }

    /// Returns true if kernels may multiply the matrix with bf16 activations.
    pub(crate) fn is_bf16(&self) -> bool {
        matches!(self.data, PackedData::Bf16(_))
    }

    /// Splits the matrix into its panels, so that threads can fill them.
    pub(crate) fn panels_mut(&mut self) -> Vec<PanelMut<'_>> {
        let elements = LANES * self.padded_columns();
        let columns = self.columns;
        let whole = |data| PanelMut { data, columns };
        match &mut self.data {
            PackedData::F32(buffer) => buffer
                .as_mut_slice()
                .chunks_mut(elements)
                .map(|panel| whole(PanelData::F32(panel)))
                .collect(),
            PackedData::F16(buffer) => buffer
                .as_mut_slice()
                .chunks_mut(elements)
                .map(|panel| whole(PanelData::F16(panel)))
                .collect(),
            PackedData::Bf16(buffer) => buffer
                .as_mut_slice()
                .chunks_mut(elements / 2)
                .map(|panel| whole(PanelData::Bf16(panel)))
                .collect(),
        }
    }

    /// Reads row `row` back. An output head that is also the embedding needs this.
    ///
    /// # Panics
    /// If there is no such row, or if `out` is not as long as the columns.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns, "a row of the matrix");
        let (panel, lane) = (row / LANES, row % LANES);
        let start = panel * LANES * self.padded_columns();
        match &self.data {
            PackedData::F32(buffer) => {
                let panel = &buffer.as_slice()[start..];
                for (column, out) in out.iter_mut().enumerate() {
                    *out = panel[column * LANES + lane];
                }
            }
            PackedData::F16(buffer) => {
                let panel = &buffer.as_slice()[start..];
                for (column, out) in out.iter_mut().enumerate() {
                    *out = half::f16::from_bits(panel[column * LANES + lane]).to_f32();
                }
            }
            PackedData::Bf16(buffer) => {
                let panel = &buffer.as_slice()[start / 2..];
                for (pair, out) in out.chunks_mut(2).enumerate() {
                    let bits = panel[pair * LANES + lane];
                    out[0] = f32::from_bits(bits << 16);
                    // An odd number of columns leaves half a pair at the end.
                    if let Some(odd) = out.get_mut(1) {
                        *odd = f32::from_bits(bits & 0xffff_0000);
                    }
                }
            }
        }
    }
}

/// One panel that can be filled.
pub(crate) struct PanelMut<'a> {
    data: PanelData<'a>,
    columns: usize,
}

enum PanelData<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    Bf16(&'a mut [u32]),
}

impl PanelMut<'_> {
    /// Fills row `lane` of the panel. `scratch` must be as long as the columns.
    pub(crate) fn fill(&mut self, lane: usize, source: RowSource<'_>, scratch: &mut [f32]) {
        let columns = self.columns;
        let range = source.row * columns..(source.row + 1) * columns;
        match &mut self.data {
            PanelData::F32(panel) => {
                source.tensor.read(range, scratch);
                for (column, value) in scratch.iter().enumerate() {
                    panel[column * LANES + lane] = *value;
                }
            }
            PanelData::F16(panel) => {
                let halves = halves(source.tensor, range);
                for (column, half) in halves.iter().enumerate() {
                    panel[column * LANES + lane] = u16::from_le_bytes(*half);
                }
            }
            PanelData::Bf16(panel) => {
                let halves = halves(source.tensor, range);
                for (pair, two) in halves.chunks(2).enumerate() {
                    let odd = two.get(1).map_or(0, |half| u16::from_le_bytes(*half));
                    let even = u16::from_le_bytes(two[0]);
                    panel[pair * LANES + lane] = u32::from(odd) << 16 | u32::from(even);
                }
            }
        }
    }
}

/// Returns the raw 16-bit elements. A 16-bit format is chosen only if every tensor has
/// that type.
fn halves<'a>(tensor: Tensor<'a>, range: std::ops::Range<usize>) -> &'a [[u8; 2]] {
    assert_eq!(tensor.element.size(), 2, "a 16-bit panel of 16-bit elements");
    &tensor.bytes.as_chunks::<2>().0[range]
}

pub(crate) fn padded_columns(columns: usize) -> usize {
    columns.next_multiple_of(COLUMN_STEP)
}

pub(crate) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(2 * LANES)
}
