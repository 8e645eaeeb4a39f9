//! Memory that the system refuses is an error of the step, and ends nothing.

use backend::{DeltaSpec, KvFormat, KvSpec, Record, Store};
use cpu::{Cpu, CpuOptions};

/// More than any address space has.
const KV: KvSpec = KvSpec {
    pages: 1 << 31,
    rows: 1 << 20,
    heads: 128,
    head_dim: 512,
    format: KvFormat {
        k: &quant::kv::F32,
        v: &quant::kv::F32,
    },
};

const DELTA: DeltaSpec = DeltaSpec {
    slots: 1 << 31,
    key_heads: 16,
    value_heads: 64,
    key_dim: 128,
    value_dim: 128,
    conv_taps: 4,
};

#[test]
fn what_cannot_be_had_is_told_once() {
    let cpu = Cpu::new(CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    });
    let cpu = cpu.unwrap();
    let told = || cpu.finish().map_err(|error| error.to_string());
    for pages in [KV.pages, usize::MAX] {
        assert_eq!(cpu.kv(KvSpec { pages, ..KV }).spec.pages, 0);
        assert!(told().unwrap_err().contains("keys and values"));
        assert_eq!(told(), Ok(()));
    }
    for slots in [DELTA.slots, usize::MAX] {
        assert_eq!(cpu.delta(DeltaSpec { slots, ..DELTA }).spec.slots, 0);
        assert!(told().unwrap_err().contains("recurrent states"));
        assert_eq!(told(), Ok(()));
    }
    let kept = cpu.kv(KvSpec { pages: 2, ..KV });
    assert_eq!(cpu.kv_save(&kept, 1).len(), 2 * 4 * 64 * 128 * 512);
    assert_eq!(told(), Ok(()));
}
