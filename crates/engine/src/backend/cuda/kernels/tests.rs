//! Tests of every kernel. The kernels run on the emulated device and are compared with
//! the CPU backend at awkward shapes. Planted bugs must be found.

mod attention;
mod compiled;
mod emulated;
mod linear;
mod rows;
mod sample;

use super::emulator::{Bug, Emulator, Memory, ORDERS, Plain};

/// Returns a fixed sequence of numbers, evenly spread over -1..1.
fn noise(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64 * 2 + 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Returns the same sequence in bf16.
fn bf16_noise(seed: usize, count: usize) -> Vec<u16> {
    noise(seed, count).into_iter().map(|value| half::bf16::from_f32(value).to_bits()).collect()
}

fn widened(values: &[u16]) -> Vec<f32> {
    values.iter().map(|bits| half::bf16::from_bits(*bits).to_f32()).collect()
}

/// The allowed difference of a value: relative to the value itself, and to a typical
/// value.
#[derive(Clone, Copy)]
struct Tolerance {
    of_itself: f64,
    of_usual: f64,
}

/// The difference from rounding a result to bf16, 2^-9 of it, and a little more.
const ROUNDED: Tolerance = Tolerance { of_itself: 0.0045, of_usual: 1e-5 };
/// The difference of f32 sums in another order.
const SUMMED: Tolerance = Tolerance { of_itself: 1e-5, of_usual: 1e-5 };
/// The difference from rounding the weights of keys to bf16 before their sum, and the
/// sum after it.
const ATTENDED: Tolerance = Tolerance { of_itself: 0.008, of_usual: 0.01 };

fn compare(found: &[f32], expected: &[f32], tolerance: Tolerance) -> Result<(), String> {
    assert_eq!(found.len(), expected.len(), "as many found as expected");
    let squares: f64 = expected.iter().map(|value| f64::from(*value).powi(2)).sum();
    let usual = (squares / expected.len().max(1) as f64).sqrt();
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - f64::from(*expected)).abs();
        let allowed = tolerance.of_itself * f64::from(expected.abs()) + tolerance.of_usual * usual;
        if error.is_nan() || error > allowed {
            return Err(format!("element {index} is {found}, not {expected}"));
        }
    }
    Ok(())
}

/// Returns the content of a buffer that a kernel had to fill. Every element must be
/// written and nothing behind the end.
fn filled<T: Plain>(output: &Memory<'_, T>) -> Result<Vec<T>, String> {
    match output.is_whole() {
        true => Ok(output.as_slice().to_vec()),
        false => Err("something was written behind the output".to_owned()),
    }
}

/// Runs a check on correct kernels in every order.
fn sound(check: impl Fn(&Emulator, u32) -> Result<(), String>) {
    let Some(emulator) = Emulator::sound() else { return };
    for order in ORDERS {
        if let Err(error) = check(emulator, order) {
            panic!("in order {order}: {error}");
        }
    }
}

/// Checks that a test passes without a bug and fails with it in at least one order.
fn finds(bug: Bug, check: impl Fn(&Emulator, u32) -> Result<(), String>) {
    let Some(emulator) = Emulator::planted() else { return };
    emulator.plant(Bug::None);
    for order in ORDERS {
        check(emulator, order).expect("without a bug nothing is found");
    }
    emulator.plant(bug);
    let found: Vec<String> = ORDERS.filter_map(|order| check(emulator, order).err()).collect();
    emulator.plant(Bug::None);
    println!("{bug:?}: {found:?}");
    assert!(!found.is_empty(), "{bug:?} went unnoticed");
}
