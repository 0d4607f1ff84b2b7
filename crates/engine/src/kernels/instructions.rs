//! The instruction sets of this machine, and the kernels compiled for them.

use std::fmt;
use std::ops::Range;

use super::{AttentionJob, AttentionScratch, AttentionTask, LinearJob, NormJob, NormRow, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16};

/// Instruction sets that kernels are compiled for, the smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Instructions {
    /// The target's baseline: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512F, without bf16 instructions.
    Avx512,
    /// AVX-512 with dot products of bf16 pairs.
    Avx512Bf16,
    /// AVX-512 BF16 and AMX tiles of bf16.
    Amx,
}

impl Instructions {
    /// Every instruction set, the smallest first.
    pub const ALL: [Self; 5] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the best set that this machine has.
    pub fn best() -> Self {
        Self::best_of(|_| true)
    }

    /// Returns the best set that gives bit-identical logits for a token in any batch.
    /// AMX tiles are excluded: only large batches use them, and they sum in another
    /// order.
    pub fn best_deterministic() -> Self {
        Self::best_of(|instructions| instructions != Self::Amx)
    }

    fn best_of(may: impl Fn(Self) -> bool) -> Self {
        Self::ALL
            .into_iter()
            .rev()
            .find(|&instructions| may(instructions) && instructions.is_available())
            .unwrap_or(Self::Portable)
    }

    /// Returns true if this machine and its system support the set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            };
            let avx512 = || avx2() && is_x86_feature_detected!("avx512f");
            let bf16 = || avx512() && is_x86_feature_detected!("avx512bf16");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2(),
                Self::Avx512 => avx512(),
                Self::Avx512Bf16 => bf16(),
                Self::Amx => bf16() && amx::is_available(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx-bf16",
        })
    }
}

/// The kernels for one instruction set that this machine has.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    instructions: Instructions,
    entries: Entries,
}

/// The kernels of one instruction set. Each is unsafe to call on a machine without the
/// instructions, and has the conditions of the function with its name.
#[derive(Clone, Copy)]
pub(super) struct Entries {
    pub(super) normalise: unsafe fn(&NormJob<'_>, NormRow),
    pub(super) linear: unsafe fn(&LinearJob<'_>, Range<usize>, Range<usize>),
    pub(super) attend: unsafe fn(&AttentionJob, &AttentionTask<'_>, &mut AttentionScratch),
}

/// Compiles the generic kernels for one vector type, with its target features, into
/// `ENTRIES`.
macro_rules! entries {
    ($vector:ident $(, $(#[$feature:meta])+)?) => {
        pub(super) const ENTRIES: super::instructions::Entries =
            super::instructions::Entries { normalise, linear, attend };

        $($(#[$feature])+)?
        unsafe fn normalise(job: &super::NormJob<'_>, row: super::NormRow) {
            // SAFETY: the caller vouches for the kernel's conditions.
            unsafe { super::norm::normalise::<$vector>(job, row) }
        }

        $($(#[$feature])+)?
        unsafe fn linear(
            job: &super::LinearJob<'_>,
            pairs: std::ops::Range<usize>,
            tokens: std::ops::Range<usize>,
        ) {
            // SAFETY: the caller vouches for the kernel's conditions.
            unsafe { super::linear::linear::<$vector>(job, pairs, tokens) }
        }

        $($(#[$feature])+)?
        unsafe fn attend(
            job: &super::AttentionJob,
            task: &super::AttentionTask<'_>,
            scratch: &mut super::AttentionScratch,
        ) {
            // SAFETY: the caller vouches for the kernel's conditions.
            unsafe { super::attention::attend::<$vector>(job, task, scratch) }
        }
    };
}
pub(super) use entries;

impl Kernels {
    /// Returns the kernels for `instructions`, or `None` if this machine lacks them.
    pub(crate) fn new(instructions: Instructions) -> Option<Self> {
        let entries = match instructions {
            Instructions::Portable => portable::ENTRIES,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => avx2::ENTRIES,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => avx512::ENTRIES,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512Bf16 => Entries { linear: avx512_bf16::linear, ..avx512::ENTRIES },
            #[cfg(target_arch = "x86_64")]
            Instructions::Amx => Entries { linear: amx::linear, ..avx512::ENTRIES },
            #[cfg(not(target_arch = "x86_64"))]
            _ => return None,
        };
        instructions.is_available().then_some(Self { instructions, entries })
    }

    pub(crate) fn instructions(self) -> Instructions {
        self.instructions
    }

    /// Returns true if linear layers with bf16 weights read bf16 activations.
    pub(crate) fn wants_bf16(self) -> bool {
        self.instructions >= Instructions::Avx512Bf16
    }

    /// Runs [`super::norm::normalise`].
    ///
    /// # Safety
    /// The conditions of that function, except for the instructions.
    pub(crate) unsafe fn normalise(self, job: &NormJob<'_>, row: NormRow) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.entries.normalise)(job, row) }
    }

    /// Runs [`super::linear::linear`].
    ///
    /// # Safety
    /// The conditions of that function, except for the instructions.
    pub(crate) unsafe fn linear(
        self,
        job: &LinearJob<'_>,
        pairs: Range<usize>,
        tokens: Range<usize>,
    ) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.entries.linear)(job, pairs, tokens) }
    }

    /// Runs [`super::attention::attend`].
    ///
    /// # Safety
    /// The conditions of that function, except for the instructions.
    pub(crate) unsafe fn attend(
        self,
        job: &AttentionJob,
        task: &AttentionTask<'_>,
        scratch: &mut AttentionScratch,
    ) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.entries.attend)(job, task, scratch) }
    }
}
