//! Packing: panels of codes from the rows of files.
//!
//! The layouts that files have most are put straight into a panel, sixteen rows at a time:
//! q4_0, q8_0, and affine codes of 4 and 8 bits. Rows of all others are unpacked first.
//! [`super::quantized`] defines a panel; here is no arithmetic but on bits.

use super::amx;
use super::pack::{self, PanelLayout, PanelSource, StoredRow, SuperblockLayout};
use super::pack_buffer::{PackBuffer, UnpackedRow};
use super::quantized::{
    AFFINE4, AFFINE6, AFFINE8, CodeKind, LEVEL4, LEVEL6, LEVEL8, QuantizedPanels, ScaleLayout,
    TABLE3, TABLE4, biased, pairs, sixes,
};
use crate::device::Device;
use quant::{Codes, Rotated, Row, Scalar, Stored, WeightLayout, Zero};
use std::sync::Mutex;

/// Codes of `bits` as bytes, from a bit stream.
fn expand(bits: usize, stream: &[u8], codes: &mut [u8]) {
    let mask = (1u64 << bits) - 1;
    let eights = codes.as_chunks_mut::<8>().0.iter_mut();
    for (eight, bytes) in eights.zip(stream.chunks_exact(bits)) {
        let mut word = [0; 8];
        word[..bits].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (i, code) in eight.iter_mut().enumerate() {
            *code = (word >> (bits * i) & mask) as u8;
        }
    }
}

/// Four codes of 4 bits in each byte's low half.
const LOW: u32 = 0x0f0f_0f0f;

/// The first `N` words of `bytes`.
#[inline(always)]
fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let words = bytes.as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// The words of a block of q4_0, whose low halves are columns 0 to 15.
#[inline(always)]
fn of_q4_0(codes: &[u8; 16]) -> [u32; 4] {
    let [a, b, c, d] = words(codes);
    let low = |first: u32, second: u32| first & LOW | (second & LOW) << 4;
    let high = |first: u32, second: u32| first >> 4 & LOW | second & !LOW;
    [low(a, b), low(c, d), high(a, b), high(c, d)]
}

/// Bytes of codes as `N` words of four.
#[inline(always)]
fn of_bytes<const K: usize, const N: usize>(codes: &[u8; K]) -> [u32; N] {
    words(codes)
}

/// Bytes of codes as `N` words of eight: four low halves and then four high ones.
#[inline(always)]
fn of_pairs<const K: usize, const N: usize>(codes: &[u8; K]) -> [u32; N] {
    let eights = codes.as_chunks::<8>().0;
    std::array::from_fn(|i| {
        let [low, high] = words(&eights[i]);
        low | high << 4
    })
}

/// 32 codes of 3 bits as three words of eight, whose spare bits are the last eight codes.
#[inline(always)]
fn of_threes(codes: &[u8; 32]) -> [u32; 3] {
    /// The lowest bit of each code.
    const LOWEST: u32 = 0x0101_0101;
    let words = words::<8>(codes);
    std::array::from_fn(|v| {
        let spare = (words[6] >> v & LOWEST) << 3 | (words[7] >> v & LOWEST) << 7;
        words[2 * v] | words[2 * v + 1] << 4 | spare
    })
}

/// 16 codes of 6 bits as three words of four, whose spare bits are the last four codes.
#[inline(always)]
fn of_sixes(codes: &[u8; 16]) -> [u32; 3] {
    /// The two lowest bits of each code.
    const LOWEST: u32 = 0x0303_0303;
    let words = words::<4>(codes);
    std::array::from_fn(|v| words[v] | (words[3] >> (2 * v) & LOWEST) << 6)
}

/// Eight codes in order, as four low halves and then four high ones: the halves of a word
/// change places in steps of two and of one.
#[inline(always)]
fn interleave(word: u32) -> u32 {
    let swap = |word: u32, by: u32, mask: u32| {
        let change = (word ^ word >> by) & mask;
        word ^ change ^ change << by
    };
    swap(swap(word, 8, 0x0000_ff00), 4, 0x00f0_00f0)
}

/// Super-blocks that are packed at a time: the first-level cache holds them while one set of four
/// rows after the other is written.
const NEAR_SUPERBLOCKS: usize = 8;

impl QuantizedPanels {
    /// Packs parts of one format with codes, as one matrix; `None` if they are not such.
    pub(crate) fn pack(
        device: &Device,
        buffers: &[Mutex<PackBuffer>],
        parts: &[Stored<'_>],
    ) -> Option<Self> {
        let first = &parts[0];
        let view = first.format.codes()?;
        let alike = parts.iter().all(|p| p.format == first.format);
        if !alike || first.cols == 0 || ![16, 32, 64, 128].contains(&view.group) {
            return None;
        }
        let (kind, levels) = kind_of(&view);
        let (scales, span) = scales_of(&view, kind, parts);
        let shape = [view.group, span];
        let kind = match in_bytes(kind) {
            Some(bytes) if device.isa.has_tiles() && amx::takes(bytes, shape, scales) => bytes,
            _ => kind,
        };
        let map = panel_codes(&view, kind);
        let mut known = (0u8..).zip(&map[..1 << view.bits]);
        let shift = known.all(|(code, &to)| to == map[0].wrapping_add(code));
        let mut packed = QuantizedPanels {
            rows: parts.iter().map(|p| p.rows).sum(),
            cols: first.cols,
            group: view.group,
            kind,
            levels,
            rotated: view.rotated,
            scales,
            span,
            code_bytes: 0,
            superblock_bytes: 0,
            panel_bytes: 0,
            shift: shift.then_some(map[0]),
            map: Box::new(map),
            source: PanelSource::Mapped(Vec::new()),
        };
        assert!(span.is_power_of_two(), "super-blocks of 1, 2, 4 … groups");
        let arrays = packed.scale_arrays();
        let scale_bytes: usize = arrays.map(|(n, size)| 16 * n * size).iter().sum();
        assert!(
            (kind != TABLE3 && view.rotated.is_none()) || span * view.group == Rotated::BLOCK,
            "super-blocks of what is rotated together"
        );
        packed.code_bytes = packed.bytes_of_codes();
        packed.superblock_bytes = (packed.code_bytes + scale_bytes).next_multiple_of(64);
        packed.panel_bytes = first.cols / view.group / span * packed.superblock_bytes;
        packed.source = pack::source(device, buffers, &packed, parts);
        Some(packed)
    }

    /// Unpacks row `index` of `part`, with codes as the panel has them.
    fn unpack_row(&self, part: &Stored<'_>, index: usize, to: &mut UnpackedRow) {
        let groups = self.cols / self.group;
        to.codes.resize(self.cols, 0);
        to.scales.resize(groups, 0.0);
        to.biases.resize(groups, 0.0);
        to.integers.iter_mut().for_each(|i| i.resize(groups, 0));
        let row = part.row(index);
        match part.format.layout {
            WeightLayout::Affine { bits, .. } => {
                expand(bits.into(), row.codes, &mut to.codes);
                for (g, (scale, bias)) in to.scales.iter_mut().zip(&mut to.biases).enumerate() {
                    *scale = row.scale.get(row.scales, g);
                    *bias = row.scale.get(row.biases, g);
                }
            }
            _ if self.scales == ScaleLayout::Integers => {
                let superblocks = self.cols / (self.group * self.span);
                let [s, t] = &mut to.integers;
                let (d, m) = (&mut to.scales[..superblocks], &mut to.biases[..superblocks]);
                part.format.unpack_super(row, &mut to.codes, d, m, s, t);
            }
            _ => part
                .format
                .unpack(row, &mut to.codes, &mut to.scales, &mut to.biases),
        }
        match self.shift {
            Some(0) => {}
            Some(by) => to.codes.iter_mut().for_each(|c| *c = c.wrapping_add(by)),
            None => {
                let map = &self.map;
                to.codes.iter_mut().for_each(|c| *c = map[usize::from(*c)]);
            }
        }
    }

    /// Writes the codes of 16 rows. Of every `stride` bytes of a row, those after the first
    /// `skip` are the codes of `1 / per` of a super-block: `words` turns `K` bytes into the row's
    /// words of `N` vectors.
    #[inline(always)]
    fn put_codes<const K: usize, const N: usize>(
        &self,
        rows: &[&[u8]; 16],
        (per, stride, skip): (usize, usize, usize),
        panel: &mut [u8],
        words: impl Fn(&[u8; K]) -> [u32; N],
    ) {
        let size = self.code_bytes / per;
        let len = size / (64 * N) * K;
        for (some, superblocks) in panel
            .chunks_mut(NEAR_SUPERBLOCKS * self.superblock_bytes)
            .enumerate()
        {
            for (k, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
                let mut start = some * NEAR_SUPERBLOCKS * per * stride + skip;
                for superblock in superblocks.chunks_exact_mut(self.superblock_bytes) {
                    for vectors in superblock[..self.code_bytes].chunks_exact_mut(size) {
                        let [a, b, c, d] =
                            rows.map(|row| row[start..start + len].as_chunks::<K>().0);
                        let from = a.iter().zip(b).zip(c.iter().zip(d));
                        let vectors = vectors.as_chunks_mut::<4>().0.as_chunks_mut::<16>().0;
                        let vectors = vectors.as_chunks_mut::<N>().0;
                        for (to, ((a, b), (c, d))) in vectors.iter_mut().zip(from) {
                            let four = [a, b, c, d].map(&words);
                            for (v, to) in to.iter_mut().enumerate() {
                                to.as_chunks_mut::<4>().0[k] =
                                    four.map(|words| words[v].to_le_bytes());
                            }
                        }
                        start += stride;
                    }
                }
            }
        }
    }

    /// Writes one number of every group of 16 rows: the `nth` of the `each` that a group has.
    /// `of(lane, group)` is its value.
    #[inline(always)]
    fn put_numbers<const S: usize>(
        &self,
        (nth, each): (usize, usize),
        panel: &mut [u8],
        of: impl Fn(usize, usize) -> [u8; S],
    ) {
        let mut groups = 0..self.cols / self.group;
        for superblock in panel.chunks_exact_mut(self.superblock_bytes) {
            let numbers = superblock[self.code_bytes..].as_chunks_mut::<S>().0;
            let numbers = numbers.as_chunks_mut::<16>().0.iter_mut();
            for (to, g) in numbers
                .skip(nth)
                .step_by(each)
                .zip(groups.by_ref().take(self.span))
            {
                *to = std::array::from_fn(|lane| of(lane, g));
            }
        }
    }

    /// Writes rows whose blocks of `B` bytes are a group each: a half-precision scale, then codes,
    /// which `words` turns into words as in [`Self::put_codes`].
    #[inline(always)]
    fn put_blocks<const B: usize, const K: usize, const N: usize>(
        &self,
        rows: &[&[u8]; 16],
        panel: &mut [u8],
        words: impl Fn(&[u8; K]) -> [u32; N],
    ) {
        self.put_codes(rows, (self.span, B, 2), panel, words);
        let blocks = rows.map(|row| row.as_chunks::<B>().0);
        self.put_numbers((0, 1), panel, |lane, g| {
            [blocks[lane][g][0], blocks[lane][g][1]]
        });
    }

    /// Writes rows that are a stream of codes of `bits` in column order, and scales and biases.
    #[inline(always)]
    fn put_affine(&self, rows: &[Row<'_>; 16], bits: usize, panel: &mut [u8]) {
        let ScaleLayout::Own(scalar) = self.scales else {
            unreachable!("a scale and a bias for each group");
        };
        let codes = rows.map(|row| row.codes);
        let stream = (1, self.group * bits / 8, 0);
        self.put_codes(&codes, stream, panel, of_bytes::<16, 4>);
        match scalar {
            Scalar::F32 => self.put_scales::<4>(rows, scalar, panel),
            Scalar::F16 | Scalar::Bf16 => self.put_scales::<2>(rows, scalar, panel),
        }
    }

    /// Writes scales and biases that are stored apart from the codes, as elements of `S` bytes.
    #[inline(always)]
    fn put_scales<const S: usize>(&self, rows: &[Row<'_>; 16], scalar: Scalar, panel: &mut [u8]) {
        for (nth, of) in [rows.map(|row| row.scales), rows.map(|row| row.biases)]
            .iter()
            .enumerate()
        {
            if rows.iter().all(|row| row.scale == scalar) {
                let of = of.map(|bytes| bytes.as_chunks::<S>().0);
                self.put_numbers((nth, 2), panel, |lane, g| of[lane][g]);
            } else {
                self.put_numbers((nth, 2), panel, |lane, g| {
                    element::<S>(scalar, rows[lane].scale.get(of[lane], g))
                });
            }
        }
    }

    /// Writes rows that were unpacked.
    #[inline(always)]
    fn put_unpacked(&self, rows: &[UnpackedRow; 16], panel: &mut [u8]) {
        let codes = rows.each_ref().map(|row| row.codes.as_slice());
        let stream = (1, self.span * self.group, 0);
        match (pairs(self.kind), self.code_bytes / 64 % 4) {
            _ if self.kind == TABLE3 => self.put_codes(&codes, stream, panel, of_threes),
            _ if sixes(self.kind) => self.put_codes(&codes, stream, panel, of_sixes),
            (true, 0) => self.put_codes(&codes, stream, panel, of_pairs::<32, 4>),
            (true, _) => self.put_codes(&codes, stream, panel, of_pairs::<8, 1>),
            (false, 0) => self.put_codes(&codes, stream, panel, of_bytes::<16, 4>),
            (false, _) => self.put_codes(&codes, stream, panel, of_bytes::<4, 1>),
        }
        match self.scales {
            ScaleLayout::Own(scalar @ Scalar::F32) => self.put_own::<4>(rows, scalar, panel),
            ScaleLayout::Own(scalar) => self.put_own::<2>(rows, scalar, panel),
            ScaleLayout::Integers => self.put_integers(rows, panel),
        }
    }

    /// Writes the scales of unpacked rows, and biases if there are any, as elements of `S` bytes.
    #[inline(always)]
    fn put_own<const S: usize>(&self, rows: &[UnpackedRow; 16], scalar: Scalar, panel: &mut [u8]) {
        let each = if biased(self.kind) { 2 } else { 1 };
        self.put_numbers((0, each), panel, |lane, g| {
            element::<S>(scalar, rows[lane].scales[g])
        });
        if each == 2 {
            self.put_numbers((1, 2), panel, |lane, g| {
                element::<S>(scalar, rows[lane].biases[g])
            });
        }
    }

    /// Writes the numbers that scales and biases are products of ([`ScaleLayout::Integers`]).
    #[inline(always)]
    fn put_integers(&self, rows: &[UnpackedRow; 16], panel: &mut [u8]) {
        let n = self.scale_arrays()[0].0;
        for (u, superblock) in panel.chunks_exact_mut(self.superblock_bytes).enumerate() {
            let (own, integers) = superblock[self.code_bytes..].split_at_mut(32 * n);
            let own = own.as_chunks_mut::<2>().0;
            let integers = integers.as_chunks_mut::<16>().0;
            let groups = u * self.span..(u + 1) * self.span;
            for (lane, row) in rows.iter().enumerate() {
                own[lane] = element(Scalar::F16, row.scales[u]);
                if n == 2 {
                    own[16 + lane] = element(Scalar::F16, row.biases[u]);
                }
                let of = row.integers[..n].iter();
                let of = of.flat_map(|of| &of[groups.clone()]);
                integers
                    .iter_mut()
                    .zip(of)
                    .for_each(|(to, &i)| to[lane] = i as u8);
            }
        }
    }
}

impl PanelLayout for QuantizedPanels {
    fn rows(&self) -> usize {
        self.rows
    }

    fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    fn source(&self) -> &PanelSource {
        &self.source
    }

    fn superblocks(&self) -> SuperblockLayout {
        let [first, second] = self.scale_arrays();
        SuperblockLayout {
            bytes: self.superblock_bytes,
            arrays: [(self.code_bytes / 64, 4), first, second],
        }
    }

    #[inline(always)]
    fn put_rows(&self, rows: &[StoredRow<'_>; 16], buffer: &mut PackBuffer, panel: &mut [u8]) {
        let stored = rows.each_ref().map(|p| p.part.row(p.row));
        let codes = stored.map(|row| row.codes);
        let format = rows[0].part.format;
        match format.layout {
            _ if format.name == "q4_0" => self.put_blocks::<18, 16, 4>(&codes, panel, of_q4_0),
            _ if format.name == "q8_0" => self.put_blocks::<34, 16, 4>(&codes, panel, of_bytes),
            WeightLayout::Affine { bits: 8, .. } => self.put_affine(&stored, 8, panel),
            WeightLayout::Affine { bits: 4, .. } => {
                self.put_affine(&stored, 4, panel);
                for superblock in panel.chunks_exact_mut(self.superblock_bytes) {
                    for word in superblock[..self.code_bytes].as_chunks_mut::<4>().0 {
                        *word = interleave(u32::from_le_bytes(*word)).to_le_bytes();
                    }
                }
            }
            _ => {
                for (p, to) in rows.iter().zip(&mut buffer.rows) {
                    self.unpack_row(&p.part, p.row, to);
                }
                self.put_unpacked(&buffer.rows, panel);
            }
        }
    }
}

/// The kind of the same codes with a byte each, if `kind` has 6 bits each.
fn in_bytes(kind: CodeKind) -> Option<CodeKind> {
    match kind {
        LEVEL6 => Some(LEVEL8),
        AFFINE6 => Some(AFFINE8),
        _ => None,
    }
}

/// How codes of a format lie in panels, and the levels that they stand for.
fn kind_of(view: &Codes) -> (CodeKind, [i8; 16]) {
    match view.zero {
        Zero::Bias if view.bits <= 4 => (AFFINE4, [0; 16]),
        Zero::Bias if view.bits <= 6 => (AFFINE6, [0; 16]),
        Zero::Bias => (AFFINE8, [0; 16]),
        Zero::Levels(levels)
            if matches!(view.bits, 5 | 6) && levels.iter().all(|l| (-32..32).contains(l)) =>
        {
            (LEVEL6, [0; 16])
        }
        Zero::Levels(_) if view.bits > 4 => (LEVEL8, [0; 16]),
        Zero::Levels(levels) if levels.iter().all(|l| (-8..8).contains(l)) => {
            (LEVEL4, std::array::from_fn(|code| code as i8 - 8))
        }
        Zero::Levels(levels) if levels.len() == 8 && view.rotated.is_some() => {
            (TABLE3, std::array::from_fn(|code| levels[code % 8]))
        }
        Zero::Levels(levels) => {
            let level = |code: usize| levels.get(code).copied().unwrap_or(0);
            (TABLE4, std::array::from_fn(level))
        }
    }
}

/// How the scales of `parts`, all of one format, lie in panels, and the groups of a super-block.
fn scales_of(view: &Codes, kind: CodeKind, parts: &[Stored<'_>]) -> (ScaleLayout, usize) {
    if view.super_group > view.group {
        return (ScaleLayout::Integers, view.super_group / view.group);
    }
    let first = &parts[0];
    let same_scale = parts.iter().all(|p| p.scale == first.scale);
    // Every type of scale fits the widest.
    let own = if same_scale { first.scale } else { Scalar::F32 };
    let scalar = view.scale.unwrap_or(own);
    // Super-blocks of whole cache lines.
    let odd = !biased(kind) && scalar.bytes() == 2;
    let is_even = (first.cols / view.group).is_multiple_of(2);
    (ScaleLayout::Own(scalar), if odd && is_even { 2 } else { 1 })
}

/// What each stored code is in a panel.
fn panel_codes(view: &Codes, kind: CodeKind) -> [u8; 256] {
    std::array::from_fn(|code| match view.zero {
        Zero::Levels(levels) if ![TABLE3, TABLE4].contains(&kind) => {
            let level = levels.get(code).copied().unwrap_or(0);
            match kind {
                LEVEL4 => (level + 8) as u8,
                LEVEL6 => (level + 32) as u8,
                _ => level as u8,
            }
        }
        _ => code as u8,
    })
}

/// `value` as an element of `scalar`, which has `S` bytes.
#[inline(always)]
fn element<const S: usize>(scalar: Scalar, value: f32) -> [u8; S] {
    let mut bytes = [0; S];
    scalar.put(&mut bytes, 0, value);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Detected;
    use crate::tests::{noise, noisy};
    use crate::{Activations, Isa};

    /// The panels of `parts`, made an element at a time.
    fn expected_panels(w: &QuantizedPanels, parts: &[Stored<'_>]) -> Vec<u8> {
        let mut panels = vec![0; w.n_panels() * w.panel_bytes];
        let groups = w.cols / w.group;
        let rows = parts.iter().flat_map(|p| (0..p.rows).map(|row| p.row(row)));
        for (i, row) in rows.enumerate() {
            let (panel, lane) = (
                &mut panels[i / 16 * w.panel_bytes..][..w.panel_bytes],
                i % 16,
            );
            let format = parts[0].format;
            let mut codes = vec![0; w.cols];
            let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
            format.unpack(row, &mut codes, &mut scales, &mut biases);
            for (c, code) in codes.iter().enumerate() {
                let (u, j) = w.place(c / w.group);
                let (at, c) = (u * w.superblock_bytes + 64 * j * w.vectors(), c % w.group);
                let code = w.map[usize::from(*code)];
                if w.kind == TABLE3 {
                    let (at, column) = (u * w.superblock_bytes + 4 * lane + c % 4, 16 * j + c);
                    match column / 8 {
                        3 => (0..3).for_each(|v| {
                            panel[at + 64 * v] |= (code >> v & 1) << (3 + c % 8 / 4 * 4);
                        }),
                        v => panel[at + 64 * v] |= code << (c % 8 / 4 * 4),
                    }
                    continue;
                }
                if sixes(w.kind) {
                    let sixteen = (j * w.group + c) / 16;
                    let at = u * w.superblock_bytes + 3 * 64 * sixteen + 4 * lane + c % 4;
                    match c % 16 / 4 {
                        3 => (0..3).for_each(|v| panel[at + 64 * v] |= (code >> (2 * v) & 3) << 6),
                        v => panel[at + 64 * v] |= code,
                    }
                    continue;
                }
                match pairs(w.kind) {
                    true => panel[at + c / 8 * 64 + 4 * lane + c % 4] |= code << (c % 8 / 4 * 4),
                    false => panel[at + c / 4 * 64 + 4 * lane + c % 4] = code,
                }
            }
            let superblocks = groups / w.span;
            let (mut d, mut m) = (vec![0.0; superblocks], vec![0.0; superblocks]);
            let (mut s, mut t) = (vec![0; groups], vec![0; groups]);
            if w.scales == ScaleLayout::Integers {
                format.unpack_super(row, &mut codes, &mut d, &mut m, &mut s, &mut t);
            }
            let two = biased(w.kind);
            for (u, superblock) in panel.chunks_exact_mut(w.superblock_bytes).enumerate() {
                let numbers = &mut superblock[w.code_bytes..];
                if w.scales == ScaleLayout::Integers {
                    Scalar::F16.put(numbers, lane, d[u]);
                    if two {
                        Scalar::F16.put(numbers, 16 + lane, m[u]);
                    }
                }
                for (j, g) in (u * w.span..(u + 1) * w.span).enumerate() {
                    match w.scales {
                        ScaleLayout::Own(scalar) if two => {
                            scalar.put(numbers, 32 * j + lane, scales[g]);
                            scalar.put(numbers, 32 * j + 16 + lane, biases[g]);
                        }
                        ScaleLayout::Own(scalar) => scalar.put(numbers, 16 * j + lane, scales[g]),
                        ScaleLayout::Integers if two => {
                            numbers[64 + 16 * j + lane] = s[g] as u8;
                            numbers[64 + 16 * (w.span + j) + lane] = t[g] as u8;
                        }
                        ScaleLayout::Integers => numbers[32 + 16 * j + lane] = s[g] as u8,
                    }
                }
            }
        }
        panels
    }

    #[test]
    fn panels_are_what_their_definition_says_for_every_format_and_instruction_set() {
        for format in noisy().filter(|format| format.codes().is_some()) {
            for cols in [1, 640, 9 * 256].map(|cols: usize| cols.next_multiple_of(format.block)) {
                let owned = noise(format, cols);
                let wide: Vec<u8> = [&owned.scales, &owned.biases]
                    .into_iter()
                    .flat_map(|bytes| bytes.as_chunks::<2>().0)
                    .flat_map(|two| [0, 0, two[0], two[1]])
                    .collect();
                let (scales, biases) = wide.split_at(wide.len() / 2);
                let apart = matches!(format.layout, WeightLayout::Affine { .. });
                // The same numbers in another type, where a matrix chooses it.
                let other = Stored {
                    scale: if apart { Scalar::F32 } else { owned.scale },
                    scales: if apart { scales } else { &owned.scales },
                    biases: if apart { biases } else { &owned.biases },
                    ..owned.view()
                };
                for parts in [
                    vec![owned.view(), owned.view().slice(4..6), owned.view()],
                    vec![other, owned.view().slice(0..13)],
                ] {
                    for isa in Isa::available() {
                        let isa = Detected::new(isa).expect("one that there is");
                        let device = Device::with(isa, 2, Activations::Int8);
                        let buffers = [Mutex::default(), Mutex::default()];
                        let w = QuantizedPanels::pack(&device, &buffers, &parts).expect("codes");
                        let PanelSource::Packed(data) = &w.source else {
                            panic!("no file")
                        };
                        assert!(
                            data.elements::<u8>() == expected_panels(&w, &parts),
                            "{}, {cols} columns, {isa:?}",
                            format.name
                        );
                    }
                }
            }
        }
    }
}
