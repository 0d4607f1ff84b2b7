//! Linear layers over bf16 with AMX tiles: one instruction multiplies sixteen tokens by
//! sixteen rows of weights over thirty-two columns.
//!
//! The compiler never uses the tile registers, so one call configures, uses and
//! releases them. Each assembly block that computes is one whole loop over the columns.

use std::arch::asm;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;

use super::avx512::Avx512;
use super::linear::{self, LinearJob};
use super::packed::PackedData;
use super::vector::Vector;
use super::{Activations, LANES, RowView, avx512_bf16};

/// Returns true if the processor has bf16 tiles and the system lets this process use
/// them. The permission is requested once and holds for every thread.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

/// Computes a linear layer like [`linear::linear`]. Few tokens, and weights that are
/// not bf16, are computed with dot products instead.
///
/// # Safety
/// The conditions of [`linear::linear`], with AVX-512 BF16 and tiles.
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn linear(job: &LinearJob<'_>, pairs: Range<usize>, tokens: Range<usize>) {
    let (Activations::Bf16(input), PackedData::Bf16(data)) = (job.input, job.weights.data()) else {
        // SAFETY: the caller vouches for the conditions.
        return unsafe { avx512_bf16::linear(job, pairs, tokens) };
    };
    if tokens.len() < FEWEST_TOKENS {
        // SAFETY: the caller vouches for the conditions.
        return unsafe { avx512_bf16::linear(job, pairs, tokens) };
    }
    let steps = job.weights.padded_columns() / TILE_COLUMNS;
    let panel = steps * TILE_BYTES / size_of::<u32>();
    // SAFETY: the weights have these pairs of panels. The input has rows up to a
    // multiple of 32, so whole tiles may be read; the epilogue runs only for the rows
    // of `tokens`.
    unsafe {
        configure();
        for pair in pairs {
            let first = data.as_ptr().add(2 * pair * panel);
            let panels = [first, first.add(panel)];
            for begin in tokens.clone().step_by(PRODUCT_ROWS) {
                let rows = begin..tokens.end.min(begin + PRODUCT_ROWS);
                multiply_and_finish(job, input, rows, PanelPair { index: pair, panels, steps });
            }
        }
        release();
    }
}

/// Multiplies up to [`PRODUCT_ROWS`] tokens by one pair of panels.
///
/// # Safety
/// Tiles must be configured. The input must have its rows up to a multiple of 32; input
/// and panels must have `steps` times 32 columns. The outputs must meet the conditions
/// of [`linear`].
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma,f16c")]
unsafe fn multiply_and_finish(
    job: &LinearJob<'_>,
    input: RowView<u16>,
    tokens: Range<usize>,
    pair: PanelPair,
) {
    let PanelPair { index, panels, steps } = pair;
    let mut products = Products([MaybeUninit::uninit(); PRODUCT_ROWS * 2 * LANES]);
    // Parts of narrow panels stay in the first-level cache while the tokens pass by.
    // With wide panels, carrying sums from part to part would cost more than it saves.
    let parts = if steps > MOST_STEPS_IN_PARTS || tokens.len() <= 2 * LANES {
        1
    } else {
        steps.div_ceil(STEPS_OF_PART)
    };
    let part = steps.div_ceil(parts);
    // SAFETY: the parts are within the columns, and each block's products lie in the
    // rows of `products` of its tokens; all are written before they are read.
    unsafe {
        let out = products.0.as_mut_ptr().cast::<f32>();
        for step in (0..steps).step_by(part) {
            for token in tokens.clone().step_by(2 * LANES) {
                let block = Block {
                    rows: input.row(token).add(step * TILE_COLUMNS),
                    pitch: input.pitch() * size_of::<u16>(),
                    high: input.pitch() * LANES,
                    panels: panels.map(|panel| panel.add(step * TILE_BYTES / size_of::<u32>())),
                    steps: part.min(steps - step),
                    out: out.add((token - tokens.start) * 2 * LANES),
                    is_first: step == 0,
                };
                if tokens.end - token > LANES { block.two_by_two() } else { block.one_by_two() }
            }
        }
        for token in tokens.clone() {
            let sums = out.cast_const().add((token - tokens.start) * 2 * LANES);
            let sums = [Avx512::load(sums), Avx512::load(sums.add(LANES))];
            linear::epilogue(job, linear::PanelRow { token, pair: index }, sums);
        }
    }
}

/// A pair of panels of the weights.
#[derive(Clone, Copy)]
struct PanelPair {
    /// Index of the pair in the matrix.
    index: usize,
    panels: [*const u32; 2],
    /// Number of times 32 columns.
    steps: usize,
}

/// Products of tokens with 32 rows of weights.
#[repr(C, align(64))]
struct Products([MaybeUninit<f32>; PRODUCT_ROWS * 2 * LANES]);

/// Sixteen or 32 tokens times two panels, over some of the columns.
struct Block {
    /// Activations of the first token.
    rows: *const u16,
    /// Bytes from one token to the next.
    pitch: usize,
    /// Elements from the first token to the seventeenth.
    high: usize,
    panels: [*const u32; 2],
    /// Number of times 32 columns.
    steps: usize,
    /// Products: 32 for each token.
    out: *mut f32,
    /// True if the products start at zero; otherwise they continue from `out`.
    is_first: bool,
}

impl Block {
    /// Multiplies 32 tokens by two panels.
    ///
    /// # Safety
    /// Tiles must be configured, and there must be 32 tokens, all columns, and room for
    /// the products.
    #[inline(always)]
    unsafe fn two_by_two(self) {
        // SAFETY: each pointer advances by one tile in each of `steps` rounds and so
        // stays within the bounds that the caller vouches for; no other code uses the
        // tile registers.
        unsafe {
            if self.is_first {
                asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3");
            } else {
                asm!(
                    "tileloadd tmm0, [{out} + {pitch}]",
                    "tileloadd tmm1, [{out} + {pitch} + 64]",
                    "tileloadd tmm2, [{out} + {pitch} + 2048]",
                    "tileloadd tmm3, [{out} + {pitch} + 2112]",
                    out = in(reg) self.out,
                    pitch = in(reg) PRODUCT_PITCH,
                    options(nostack, readonly),
                );
            }
            asm!(
                "2:",
                "tileloadd tmm4, [{low} + {pitch}]",
                "tileloadd tmm6, [{first} + {line}]",
                "tileloadd tmm7, [{second} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{high} + {pitch}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {low}, 64",
                "add {high}, 64",
                "add {first}, 1024",
                "add {second}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{out} + {out_pitch}], tmm0",
                "tilestored [{out} + {out_pitch} + 64], tmm1",
                "tilestored [{out} + {out_pitch} + 2048], tmm2",
                "tilestored [{out} + {out_pitch} + 2112], tmm3",
                low = inout(reg) self.rows => _,
                high = inout(reg) self.rows.add(self.high) => _,
                pitch = in(reg) self.pitch,
                first = inout(reg) self.panels[0] => _,
                second = inout(reg) self.panels[1] => _,
                line = in(reg) TILE_LINE,
                steps = inout(reg) self.steps => _,
                out = in(reg) self.out,
                out_pitch = in(reg) PRODUCT_PITCH,
                options(nostack),
            );
        }
    }

    /// Multiplies 16 tokens by two panels.
    ///
    /// # Safety
    /// Tiles must be configured, and there must be 16 tokens, all columns, and room for
    /// the products.
    #[inline(always)]
    unsafe fn one_by_two(self) {
        // SAFETY: the same conditions hold as in `two_by_two`.
        unsafe {
            if self.is_first {
                asm!("tilezero tmm0", "tilezero tmm1");
            } else {
                asm!(
                    "tileloadd tmm0, [{out} + {pitch}]",
                    "tileloadd tmm1, [{out} + {pitch} + 64]",
                    out = in(reg) self.out,
                    pitch = in(reg) PRODUCT_PITCH,
                    options(nostack, readonly),
                );
            }
            asm!(
                "2:",
                "tileloadd tmm4, [{low} + {pitch}]",
                "tileloadd tmm6, [{first} + {line}]",
                "tileloadd tmm7, [{second} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {low}, 64",
                "add {first}, 1024",
                "add {second}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{out} + {out_pitch}], tmm0",
                "tilestored [{out} + {out_pitch} + 64], tmm1",
                low = inout(reg) self.rows => _,
                pitch = in(reg) self.pitch,
                first = inout(reg) self.panels[0] => _,
                second = inout(reg) self.panels[1] => _,
                line = in(reg) TILE_LINE,
                steps = inout(reg) self.steps => _,
                out = in(reg) self.out,
                out_pitch = in(reg) PRODUCT_PITCH,
                options(nostack),
            );
        }
    }
}

/// Configures every tile as 16 rows of 64 bytes.
///
/// # Safety
/// The processor must have tiles, and the system must permit them.
#[inline(always)]
unsafe fn configure() {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    config.row_bytes[..8].fill(64);
    config.rows[..8].fill(16);
    // SAFETY: the structure has 64 bytes in the layout that the instruction reads.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}

/// Releases the tiles' state, so that a switch of threads need not save it.
///
/// # Safety
/// The processor must have tiles, and the system must permit them.
#[inline(always)]
unsafe fn release() {
    // SAFETY: nothing in the tiles is needed any more.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

fn has_tiles() -> bool {
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    features & AMX_BF16 != 0 && features & AMX_TILE != 0
}

/// Asks the system for permission to use the tiles' state, which Linux saves only on
/// request.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    // These numbers are of the interface of Linux on x86-64.
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_STATE_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: this call reads and writes no memory of this process; the kernel clobbers
    // rcx and r11 as declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") REQUEST_STATE_PERMISSION,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

// These are bits of the processor's answer to leaf 7 of CPUID.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
const TILE_COLUMNS: usize = 32;
const TILE_BYTES: usize = 1024;
const TILE_LINE: usize = 64;
/// Bytes from one token's products to the next token's.
const PRODUCT_PITCH: usize = 2 * LANES * size_of::<f32>();
/// Tokens with products that are kept at once, a multiple of 32. Their products take 32
/// KiB.
const PRODUCT_ROWS: usize = 256;
/// Number of times 32 columns that are multiplied before the next tokens follow.
const STEPS_OF_PART: usize = 10;
const MOST_STEPS_IN_PARTS: usize = 64;
/// The fewest tokens for which tiles are faster than dot products.
const FEWEST_TOKENS: usize = 4;
