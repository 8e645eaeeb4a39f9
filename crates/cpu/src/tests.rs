//! The conformance suite on every instruction set and several thread counts.

use crate::{Cpu, CpuError, CpuOptions, Isa};
use backend::conformance;

fn each(check: impl Fn(&Cpu)) {
    for isa in Isa::available() {
        for threads in [1, 2, 3] {
            let cpu = Cpu::new(CpuOptions { threads, isa: Some(isa) }).unwrap();
            check(&cpu);
        }
    }
}

#[test]
fn every_op_has_the_bits_of_the_reference() {
    each(|cpu| conformance::check_bits_equal_reference(cpu));
}

#[test]
fn no_row_depends_on_its_company() {
    each(|cpu| conformance::check_row_invariance(cpu));
}

#[test]
fn what_this_cpu_lacks_is_an_error() {
    let wanted = if cfg!(target_arch = "aarch64") { Isa::Avx512 } else { Isa::Neon };
    let error = Cpu::new(CpuOptions { isa: Some(wanted), ..CpuOptions::default() }).err();
    assert!(matches!(error, Some(CpuError::MissingIsa { .. })), "{error:?}");
}
