//! Tokens chosen where their logits are (kernels/choose.cu, kernels/elementwise.cu).

use crate::args::{Address, Args};
use crate::launch::Device;
use crate::machine::Grid;
use crate::memory::{Buffer, Cell, cell, tensor};
use crate::{Cuda, Kernel, elementwise};
use backend::moments::{Deviation, Moments, Surprise};
use backend::{Edit, Likeliest, RowEdits, Tensor, TokenChoice, TokenList, TokenMask};
use std::sync::Arc;

/// Columns of a block that has a part of a row, and its threads, as in the kernels.
const PART: usize = 2048;
const THREADS: usize = 256;

/// Threads of a block that has a row's cut.
const CUT_THREADS: usize = 1024;

/// Bytes of how many tokens a row has in each bucket and their mass, as `choose_weigh` adds them up.
const WEIGHTS: usize = 2 * 256 * 8;

/// Words of a [`TokenChoice`] on the device.
pub(crate) const WORDS: usize = 10;

/// A choice, as `TokenChoice` in kernels/choose.cu has it.
pub(crate) fn words(c: &TokenChoice) -> [u32; WORDS] {
    let (low, high) = (|v: u64| v as u32, |v: u64| (v >> 32) as u32);
    [
        low(c.seed),
        high(c.seed),
        low(c.position),
        high(c.position),
        c.scale.to_bits(),
        c.top_p.to_bits(),
        c.ln_min_p.to_bits(),
        c.top_k,
        c.floor.to_bits(),
        0,
    ]
}

/// What it takes to choose some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum By {
    /// No more than their logits.
    Largest,
    /// Noise.
    Noise,
    /// Noise, and room for tokens that a cut may go through.
    Cut,
}

impl By {
    pub(crate) fn of(choices: &[TokenChoice]) -> Self {
        if choices.iter().any(|c| c.top_k > 0 || c.top_p < 1.0) {
            By::Cut
        } else if choices.iter().any(|c| c.scale != 0.0) {
            By::Noise
        } else {
            By::Largest
        }
    }
}

/// The tokens of the columns: where, and how many after a row's come the next one's. All
/// tokens if nowhere.
pub(crate) type Ids = (Address, usize);

/// The tokens of `list`, or all.
pub(crate) fn listed(cuda: &Cuda, list: Option<&TokenList>) -> Ids {
    (list.map_or(0, |list| cuda.address(list.on_device())), 0)
}

/// Has the token of each of `rows` of `cols` logits at `x` written to `chosen`; `choices` has a
/// [`TokenChoice`] for each.
pub(crate) fn choose(
    device: &Device,
    (x, [rows, cols]): (Address, [usize; 2]),
    (ids, apart): Ids,
    by: By,
    choices: Address,
    chosen: Address,
) {
    if by == By::Largest && apart == 0 {
        return elementwise::largest(device, x, [rows, cols], ids, chosen);
    }
    let parts = cols.div_ceil(PART);
    let cuts = usize::from(by == By::Cut);
    let buffer = |bytes| device.arena.buffer(bytes);
    let (tops, bests) = (buffer(8 * rows * parts), buffer(8 * rows * parts));
    let weights = buffer(cuts * rows * WEIGHTS);
    let (keys, limits) = (buffer(cuts * rows * cols * 8), buffer(cuts * rows * 8));
    let [weights_at, limits_at] = [&weights, &limits].map(|b| b.address * cuts as Address);
    let launch = |name, grid, args: Args| {
        device.launch(&Kernel::new("choose", name), grid, args.int(cols));
    };
    let (each_part, each_row) = (Grid::rect(parts, rows, THREADS), Grid::new(rows, THREADS));
    let x = Args::default().ptr(x).ptr(ids).int(apart);
    let args = x.clone().ptr(tops.address).ptr(weights_at);
    launch("choose_tops", each_part, args);
    if by == By::Cut {
        let args = x.clone().ptr(choices).ptr(tops.address).ptr(weights_at);
        launch("choose_weigh", each_part, args.clone());
        let args = args.ptr(keys.address).ptr(limits_at);
        launch("choose_cut", Grid::new(rows, CUT_THREADS), args);
    }
    let args = x.ptr(choices).ptr(tops.address);
    let noise = args.clone().ptr(limits_at).ptr(bests.address);
    launch("choose_noise", each_part, noise);
    launch("choose_best", each_row, args.ptr(bests.address).ptr(chosen));
}

/// Has the probability of the likeliest token of each of `rows` of `cols` logits at `x` written to `out`.
pub(crate) fn confidences(device: &Device, (x, [rows, cols]): (Address, [usize; 2]), out: Address) {
    let args = Args::default().ptr(x).ptr(out).int(cols);
    let kernel = Kernel::new("choose", "confidences");
    device.launch(&kernel, Grid::new(rows, CUT_THREADS), args);
}

/// The probability of each row's likeliest token.
pub(crate) fn confidences_of(cuda: &Cuda, x: &Tensor) -> Vec<f32> {
    let out = cuda.device.arena.buffer(4 * x.rows());
    let logits = (cuda.address(x), [x.rows(), x.cols()]);
    confidences(&cuda.device, logits, out.address);
    let mut found = vec![0u32; x.rows()];
    cuda.device.driver.read(&mut found, out.address);
    found.into_iter().map(f32::from_bits).collect()
}

/// The column of each row's largest value; the lowest of equal ones.
pub(crate) fn argmax(cuda: &Cuda, x: &Tensor) -> Vec<u32> {
    let (device, rows) = (&cuda.device, x.rows());
    let best = device.arena.buffer(4 * rows);
    let at = cuda.address(x);
    elementwise::largest(device, at, [rows, x.cols()], 0, best.address);
    let mut found = vec![0u32; rows];
    device.driver.read(&mut found, best.address);
    found
}

pub(crate) fn choose_tokens(
    cuda: &Cuda,
    x: &Tensor,
    list: Option<&TokenList>,
    choices: &[TokenChoice],
) -> Option<Vec<u32>> {
    assert_eq!(choices.len(), x.rows(), "a choice a row");
    let all: Vec<u32> = choices.iter().flat_map(words).collect();
    let device = &cuda.device;
    let all = device.arena.of(&all);
    let chosen = device.arena.buffer(4 * x.rows());
    // Greedy rows too: what is not a number counts as least there.
    let by = match By::of(choices) {
        By::Largest => By::Noise,
        by => by,
    };
    let logits = (cuda.address(x), [x.rows(), x.cols()]);
    choose(
        device,
        logits,
        listed(cuda, list),
        by,
        all.address,
        chosen.address,
    );
    let mut found = vec![0u32; x.rows()];
    cuda.device.driver.read(&mut found, chosen.address);
    Some(found)
}

/// Instead of where a row's mask starts, if it has none (kernels/choose.cu).
const NO_MASK: u32 = u32::MAX;

/// Words that are copied at once: 64 KiB, two masks of 262,144 tokens. Of more, the driver would wait
/// until the device has come so far.
const PIECE: usize = 16 << 10;

/// `words` on the device, without a wait for it.
fn send(device: &Device, words: &[u32]) -> Buffer {
    let sent = device.arena.buffer(4 * words.len());
    let pieces = words.chunks(PIECE).zip((sent.address..).step_by(4 * PIECE));
    pieces.for_each(|(piece, to)| device.driver.write(to, piece));
    sent
}

/// `x` as another tensor in the same place, for it is about to be changed there: an f16 copy of `x`
/// would be one of other values.
fn renamed(x: Tensor) -> Arc<Cell> {
    let same_place = Cell::f32(x.rows(), x.cols());
    cell(&x).give(&same_place);
    same_place
}

/// For each row of `cols` logits the word at which its mask starts, or [`NO_MASK`], and then the masks.
/// Neighbors that share the bits of one mask have it once.
fn mask_words(cols: usize, masks: &[Option<TokenMask>]) -> Vec<u32> {
    let mut words = vec![NO_MASK; masks.len()];
    let mut last: Option<&TokenMask> = None;
    for (row, mask) in masks.iter().enumerate() {
        let Some(mask) = mask else { continue };
        assert_eq!(mask.n_tokens(), cols, "a bit for each token");
        if last.is_none_or(|last| !std::ptr::eq(last.words(), mask.words())) {
            words.extend_from_slice(mask.words());
        }
        words[row] = (words.len() - mask.words().len()) as u32;
        last = Some(mask);
    }
    words
}

/// `x` with -inf in place of each logit that its row's mask does not allow. Does not wait for the device.
pub(crate) fn mask_logits(cuda: &Cuda, x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
    let (rows, cols) = (x.rows(), x.cols());
    assert_eq!(masks.len(), rows, "a mask, or none, for each row");
    if masks.iter().all(Option::is_none) {
        return x;
    }
    // Launches what makes the logits, so that the device computes them while the masks are put together.
    cuda.address(&x);
    let device = &cuda.device;
    let masks = send(device, &mask_words(cols, masks));
    let masked = renamed(x);
    let args = Args::default()
        .ptr(masked.address(&device.arena))
        .ptr(masks.address)
        .int(cols);
    let grid = Grid::rect(cols.div_ceil(PART), rows, THREADS);
    device.launch(&Kernel::new("choose", "mask_logits"), grid, args);
    tensor(masked)
}

/// Edits of all rows, as `edit_logits` of kernels/choose.cu reads them: for each row the word at which
/// its edits start, where the last row's end, and two words an edit: what is done in the two highest bits
/// of the first, the column below them, and the number it is done with.
fn edit_words(cols: usize, edits: &[RowEdits]) -> Vec<u32> {
    let n_edits: usize = edits.iter().map(|row| row.as_slice().len()).sum();
    let mut words = Vec::with_capacity(edits.len() + 1 + 2 * n_edits);
    let mut start = edits.len() + 1;
    words.push(start as u32);
    for row in edits {
        start += 2 * row.as_slice().len();
        words.push(start as u32);
    }
    for &(column, edit) in edits.iter().flat_map(RowEdits::as_slice) {
        assert!((column as usize) < cols, "a column of the row");
        let (what, number) = match edit {
            Edit::Divide(by) => (0, by),
            Edit::Add(x) => (1, x),
            Edit::Suppress => (2, 0.0),
        };
        words.extend([what << EDIT_SHIFT | column, number.to_bits()]);
    }
    words
}

/// Bits of an edit's column: below what is done to its logit, as in kernels/choose.cu.
const EDIT_SHIFT: u32 = 30;

/// `x`, each row after its edits. Does not wait for the device.
pub(crate) fn edit_logits(cuda: &Cuda, x: Tensor, edits: &[RowEdits]) -> Tensor {
    let (rows, cols) = (x.rows(), x.cols());
    assert_eq!(edits.len(), rows, "edits for each row");
    let most = edits.iter().map(|row| row.as_slice().len()).max();
    let most = most.unwrap_or(0);
    if most == 0 {
        return x;
    }
    // Launches what makes the logits, so that the device computes them while the edits are sent.
    cuda.address(&x);
    let device = &cuda.device;
    let words = send(device, &edit_words(cols, edits));
    let edited = renamed(x);
    let args = Args::default()
        .ptr(edited.address(&device.arena))
        .ptr(words.address)
        .int(cols);
    let grid = Grid::rect(most.div_ceil(THREADS), rows, THREADS);
    device.launch(&Kernel::new("choose", "edit_logits"), grid, args);
    tensor(edited)
}

/// Sums of a part of a row, as `moments` of kernels/choose.cu writes them, and the row's largest logit.
const SUMS: usize = 6;

pub(crate) fn moments(cuda: &Cuda, x: &Tensor, rows: &[usize]) -> Vec<Moments> {
    if rows.is_empty() {
        return Vec::new();
    }
    let (cols, parts) = (x.cols(), x.cols().div_ceil(PART));
    let device = &cuda.device;
    let asked: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    assert!(rows.iter().all(|&row| row < x.rows()), "a row of `x`");
    let asked = device.arena.of(&asked);
    let tops = device.arena.buffer(8 * x.rows() * parts);
    let out = device.arena.buffer(8 * rows.len() * parts * SUMS);
    let at = Args::default().ptr(cuda.address(x));
    let of_tops = at.clone().ptr(0).int(0).ptr(tops.address).ptr(0).int(cols);
    let each_part = Grid::rect(parts, x.rows(), THREADS);
    device.launch(&Kernel::new("choose", "choose_tops"), each_part, of_tops);
    let args = at.ptr(asked.address).ptr(tops.address).ptr(out.address);
    let each_part = Grid::rect(parts, rows.len(), THREADS);
    device.launch(&Kernel::new("choose", "moments"), each_part, args.int(cols));
    let mut words = vec![0u32; 2 * rows.len() * parts * SUMS];
    device.driver.read(&mut words, out.address);
    let sums = words.chunks_exact(2);
    let sums: Vec<u64> = sums
        .map(|w| u64::from(w[1]) << 32 | u64::from(w[0]))
        .collect();
    let of_row = |parts: &[u64]| {
        let total = |i| parts.iter().skip(i).step_by(SUMS).sum::<u64>();
        let squares = parts
            .iter()
            .skip(2)
            .step_by(SUMS)
            .copied()
            .map(u128::from)
            .sum();
        Moments {
            largest: f32::from_bits(parts[SUMS - 1] as u32),
            deviation: Deviation::of_sums(total(0), total(1), squares),
            surprise: Surprise::of_sums(total(3), total(4)),
        }
    };
    sums.chunks_exact(parts * SUMS).map(of_row).collect()
}

pub(crate) fn likeliest(
    cuda: &Cuda,
    x: &Tensor,
    asked: &[(usize, u32)],
    n: usize,
) -> Vec<Likeliest> {
    if asked.is_empty() {
        return Vec::new();
    }
    let pairs = asked.iter().map(|&(row, token)| {
        assert!(row < x.rows() && (token as usize) < x.cols());
        [row as u32, token]
    });
    let pairs: Vec<u32> = pairs.flatten().collect();
    let pairs = cuda.device.arena.of(&pairs);
    let (rows, parts) = (asked.len(), x.cols().div_ceil(PART));
    // The largest is one of them.
    let m = n.max(1);
    // A mass, a logit, and a token with its score for each of the best.
    let words = 4 + 2 * m;
    let buffer = |bytes| cuda.device.arena.buffer(bytes);
    let (bests, masses) = (buffer(8 * rows * parts * m), buffer(8 * rows * parts));
    let out = buffer(4 * rows * words);
    let launch =
        |name, grid, args: Args| cuda.device.launch(&Kernel::new("choose", name), grid, args);
    let args = Args::default().ptr(cuda.address(x)).ptr(pairs.address);
    let args = args.ptr(bests.address);
    let each_part = Grid::rect(parts, rows, THREADS);
    let of_parts = args.clone().int(x.cols()).int(m);
    launch("likely_parts", each_part, of_parts);
    let args = args.ptr(masses.address);
    let of_masses = args.clone().int(x.cols()).int(m);
    launch("likely_masses", each_part, of_masses);
    let args = args.ptr(out.address).int(x.cols()).int(m).int(parts);
    launch("likely_rows", Grid::new(rows, THREADS), args);
    let mut found = vec![0u32; rows * words];
    cuda.device.driver.read(&mut found, out.address);
    let of = |words: &[u32]| {
        let (head, top) = words.split_at(4);
        let top = top.chunks_exact(2).map(|b| (b[1], f32::from_bits(b[0])));
        let mut top: Vec<(u32, f32)> = top.take_while(|&(id, _)| id != u32::MAX).collect();
        let largest = top.first().map_or(f32::NEG_INFINITY, |&(_, logit)| logit);
        top.truncate(n);
        Likeliest {
            top,
            largest,
            logit: f32::from_bits(head[2]),
            mass: u64::from(head[1]) << 32 | u64::from(head[0]),
        }
    };
    found.chunks_exact(words).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_lie_behind_where_each_rows_start() {
        let rows = [
            vec![
                (7, Edit::Add(-0.5)),
                (3, Edit::Suppress),
                (7, Edit::Divide(1.5)),
            ],
            vec![],
            vec![(9, Edit::Divide(2.0))],
        ];
        let number = f32::to_bits;
        let words = [4, 10, 10, 12]
            .into_iter()
            .chain([2 << 30 | 3, 0, 1 << 30 | 7, number(-0.5), 7, number(1.5)])
            .chain([9, number(2.0)]);
        let words: Vec<u32> = words.collect();
        assert_eq!(edit_words(10, &rows.map(RowEdits::new)), words);
    }

    #[test]
    fn masks_lie_behind_where_they_start_and_neighbors_share_theirs() {
        let [a, b] = [[0, 33], [1, 39]].map(|allowed| TokenMask::new(40, allowed));
        let masks = [
            None,
            Some(a.clone()),
            Some(a.clone()),
            None,
            Some(a),
            Some(b),
        ];
        let starts = [NO_MASK, 6, 6, NO_MASK, 6, 8];
        let words = [1, 2, 2, 1 << 7];
        assert_eq!(mask_words(40, &masks), [&starts[..], &words].concat());
        assert_eq!(mask_words(40, &[None, None]), [NO_MASK; 2]);
    }
}
