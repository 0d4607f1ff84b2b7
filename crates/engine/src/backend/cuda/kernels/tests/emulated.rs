//! Tests of errors that the emulated device itself must report, so that a passing
//! kernel test can be trusted.

use super::*;
use crate::backend::cuda::kernels::{EmbedArgs, FillArgs, Launch, NAMES, embed, fill};

fn refusal<A>(launch: &Launch<A>) -> Option<String> {
    Some(Emulator::sound()?.launch(launch, 0).expect_err("it was to be refused"))
}

#[test]
fn wrong_argument_size_is_refused() {
    let args = FillArgs { words: 0, count: 0, value: 0 };
    let launch = Launch { kernel: "embed", ..fill(args) };
    let said = refusal(&launch).unwrap_or_else(|| "embed takes".to_owned());
    assert!(said.contains("embed takes"), "{said}");
    let launch = Launch { threads: 128, ..fill(args) };
    let said = refusal(&launch).unwrap_or_else(|| "fill takes".to_owned());
    assert!(said.contains("fill takes"), "{said}");
}

#[test]
fn unknown_kernel_is_refused() {
    let launch = Launch { kernel: "no such", grid: [1; 3], threads: 32, args: 0_u32 };
    let said = refusal(&launch).unwrap_or_else(|| "no such".to_owned());
    assert!(said.contains("no such"), "{said}");
}

#[test]
fn access_outside_a_buffer_is_refused() {
    let Some(emulator) = Emulator::sound() else { return };
    let (residual, tokens) = (emulator.memory::<f32>(8), emulator.copy(&[0_u32]));
    let table = emulator.copy(&[0_u16; 8]);
    for table in [0, table.at() - (1 << 12)] {
        let args = EmbedArgs { residual: residual.at(), table, tokens: tokens.at(), hidden: 8 };
        let said = refusal(&embed(args, 1)).expect("there is an emulator");
        assert!(said.contains("embed: block (0, 0, 0), thread 0: touched"), "{said}");
    }
    let args =
        EmbedArgs { residual: residual.at(), table: table.at(), tokens: tokens.at(), hidden: 8 };
    emulator.launch(&embed(args, 1), 0).expect("and after a fault it goes on");
}

#[test]
fn every_name_is_a_kernel() {
    for kernel in NAMES {
        let launch = Launch { kernel, grid: [1; 3], threads: 1, args: 0_u8 };
        let said = refusal(&launch).unwrap_or_else(|| "takes".to_owned());
        assert!(said.contains("takes"), "{said}");
    }
}
