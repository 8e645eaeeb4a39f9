//! Memory: large zeroed regions for weights and caches, and recycled buffers for
//! a step's tensors.

use backend::{Recycle, Storage, Tensor};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The size of a large page; regions that ask for them start on its boundary.
const HUGE_PAGE: usize = 2 << 20;

/// The size in bytes from which on a region that is written here and there asks for large pages.
/// The first write to such a page takes all of its memory; in a region of at least eight, a page
/// taken too early is at most an eighth of it.
const SPARSE: usize = 8 * HUGE_PAGE;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Has the allocator give blocks of a megabyte or more back to the system as soon as they are
/// freed. By default glibc keeps memory for blocks as large as the largest ever freed, up to
/// 64 MB: 10 MB after the load of a vocabulary of 250 000 tokens.
pub(crate) fn give_blocks_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        // SAFETY: the allocator takes a lock of its own to change these two numbers, of
        // which any value is a valid one.
        ONCE.call_once(|| unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 8 << 20);
        });
    }
}

/// Memory that starts as zeros, aligned to a cache line or better. Pages that are never
/// written stay unmapped, so a cache takes the memory of what is in it.
pub(crate) struct Region {
    /// The allocation, and its layout.
    base: *mut u8,
    layout: Layout,
    /// Bytes of the allocation before the region, which align it.
    offset: usize,
    /// Bytes of the region.
    len: usize,
}

// SAFETY: a region owns its allocation, which any thread may use and free.
unsafe impl Send for Region {}
// SAFETY: shared references to a region only read its bytes.
unsafe impl Sync for Region {}

impl Region {
    /// A region of `len` zeros, all of which will be written.
    pub(crate) fn zeroed(len: usize) -> Self {
        let layout = Layout::from_size_align(len, 16).expect("a size that fits the address space");
        Self::new(len, HUGE_PAGE).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// A region of `len` zeros, many of which may never be written; none where the system refuses so many.
    pub(crate) fn sparse(len: usize) -> Option<Self> {
        Self::new(len, SPARSE)
    }

    /// A region of `len` zeros, in large pages if `len` is at least `huge`.
    fn new(len: usize, huge: usize) -> Option<Self> {
        let align = if len >= huge { HUGE_PAGE } else { LINE };
        // Aligned by hand: the allocator itself would clear memory of a large alignment and touch
        // every page, while large blocks of a small one come as untouched zeros.
        let layout = Layout::from_size_align(len.checked_add(align)?, 16).ok()?;
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            return None;
        }
        let offset = base.align_offset(align);
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            // SAFETY: the range lies in the allocation; the advice changes no content,
            // and a kernel that ignores it costs speed only.
            unsafe { libc::madvise(base.add(offset).cast(), len, libc::MADV_HUGEPAGE) };
        }
        Some(Region {
            base,
            layout,
            offset,
            len,
        })
    }

    /// The region as elements of `T`.
    pub(crate) fn elements<T: Plain>(&self) -> &[T] {
        // SAFETY: `len` bytes from the offset on lie in the allocation, aligned to a cache line
        // and initialized, and any bytes are a `T`.
        unsafe {
            std::slice::from_raw_parts(self.base.add(self.offset).cast(), self.len / size_of::<T>())
        }
    }

    /// The region as elements of `T`, to write.
    pub(crate) fn elements_mut<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: `len` bytes from the offset on lie in the allocation, aligned to a cache line
        // and initialized, any bytes are a `T`, and the region is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.base.add(self.offset).cast(),
                self.len / size_of::<T>(),
            )
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` was allocated with this layout, and nothing borrows it any more.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// A type of numbers of which any bytes are a value.
///
/// # Safety
///
/// Every bit pattern is a value of the type, which has no padding and is aligned to a cache line
/// at most.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: a plain number.
unsafe impl Plain for u8 {}
// SAFETY: a plain number.
unsafe impl Plain for i8 {}
// SAFETY: a plain number.
unsafe impl Plain for f32 {}
// SAFETY: wraps a `u16` transparently.
unsafe impl Plain for half::f16 {}
// SAFETY: wraps a `u16` transparently.
unsafe impl Plain for half::bf16 {}

/// Bytes of a region as elements of `T`.
#[inline(always)]
pub(crate) fn elements<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: `align_to` gives aligned elements only, and any bytes are a `T`.
    let (before, elements, _) = unsafe { bytes.align_to() };
    assert!(before.is_empty(), "elements lie where they are aligned");
    elements
}

/// 16 values on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// The memory of a tensor.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    /// Values of the tensor, which may be fewer than the lines hold.
    len: usize,
    /// The values in the order in which some kernel reads them, made when it first asks.
    repacked: OnceLock<Vec<f32>>,
}

impl Buffer {
    pub(crate) fn values(&self) -> &[f32] {
        // SAFETY: `len` values lie in the lines, which are arrays of `f32` without gaps.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        self.repacked.take();
        // SAFETY: `len` values lie in the lines, which are arrays of `f32` without gaps, and the
        // buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// The values in the order that `repack` gives them. The result is kept, so all callers must
    /// ask for the same order.
    pub(crate) fn repacked(&self, repack: impl FnOnce(&[f32]) -> Vec<f32>) -> &[f32] {
        self.repacked.get_or_init(|| repack(self.values()))
    }
}

/// Buffers that no tensor uses now, for the next tensors: about as many as a step ever had alive
/// at once.
pub(crate) struct Arena {
    /// The buffers of each size class.
    free: Mutex<Vec<Vec<Storage>>>,
}

/// Size classes in which a large tensor looks for a free buffer, from its own upward: up to
/// four times its size. So the last step of a prompt, with fewer rows than the steps before,
/// uses their buffers.
const REACH: usize = 8;

/// Cache lines from which on a tensor is large: 256 KiB. Large tensors take larger buffers and
/// replace smaller ones, to save memory; small ones have buffers of their own class only, of which
/// there are enough after a few steps.
const LARGE: usize = 4096;

/// The size class of a buffer for `lines` cache lines, and how many lines it has. There are four
/// classes between a power of two and the next, so at most a quarter is wasted.
fn class(lines: usize) -> (usize, usize) {
    if lines <= 4 {
        return (lines, lines);
    }
    let octave = (lines - 1).ilog2() as usize - 1;
    let step = 1 << (octave - 1);
    let quarter = (lines.next_multiple_of(step) - (4 * step)) / step;
    (4 * octave + quarter, (4 + quarter) * step)
}

impl Arena {
    pub(crate) fn new() -> Self {
        Arena {
            free: Mutex::new((0..256).map(|_| Vec::new()).collect()),
        }
    }

    /// A buffer for `len` values, of unspecified content.
    fn take(&self, len: usize) -> Storage {
        let (class, capacity) = class(len.div_ceil(16));
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let reach = if capacity < LARGE { 1 } else { REACH };
        let found = free[class..class + reach].iter_mut().find_map(Vec::pop);
        let mut storage = found.unwrap_or_else(|| {
            // A new large buffer will do where the next smaller one did, which goes.
            let mut smaller = free[class - (reach - 1)..class].iter_mut().rev();
            drop(smaller.find_map(Vec::pop));
            Box::new(Buffer {
                lines: vec![Line([0.0; 16]); capacity],
                len: 0,
                repacked: OnceLock::new(),
            })
        });
        drop(free);
        let buffer: &mut Buffer = storage.downcast_mut().expect("only buffers are kept");
        buffer.len = len;
        buffer.repacked.take();
        if cfg!(test) {
            // What a kernel reads before it writes shows up in its result.
            buffer.values_mut().fill(f32::NAN);
        }
        storage
    }

    /// A tensor of unspecified content.
    pub(crate) fn tensor(self: &Arc<Self>, rows: usize, cols: usize) -> Tensor {
        Tensor::new(rows, cols, self.take(rows * cols), Some(self.clone()))
    }
}

impl Recycle for Arena {
    fn recycle(&self, storage: Storage) {
        if let Some(buffer) = storage.downcast_ref::<Buffer>() {
            let (class, _) = class(buffer.lines.len());
            self.free.lock().unwrap_or_else(PoisonError::into_inner)[class].push(storage);
        }
    }
}

/// The values of `x`.
pub(crate) fn values(x: &Tensor) -> &[f32] {
    x.storage::<Buffer>().values()
}

/// The values of `x`, to write.
pub(crate) fn values_mut(x: &mut Tensor) -> &mut [f32] {
    x.storage_mut::<Buffer>().values_mut()
}

/// The bytes of `values`, as a type of one byte.
pub(crate) fn bytes<T: Plain>(values: &[f32]) -> &[T] {
    assert_eq!(size_of::<T>(), 1, "bytes");
    // SAFETY: each value has four bytes, and any bytes are a `T`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), 4 * values.len()) }
}

/// The bytes of `values`, as a type of one byte, to write.
pub(crate) fn bytes_mut<T: Plain>(values: &mut [f32]) -> &mut [T] {
    assert_eq!(size_of::<T>(), 1, "bytes");
    // SAFETY: each value has four bytes; any bytes are a `T`, and an `f32` when written.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), 4 * values.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_asked_for_and_waste_a_quarter_at_most() {
        let mut last = (0, 0);
        for lines in 0..100_000 {
            let (index, capacity) = class(lines);
            assert!(
                capacity >= lines && capacity * 4 <= lines * 5 + 4,
                "{lines} lines in {capacity}"
            );
            assert_eq!(
                class(capacity),
                (index, capacity),
                "a recycled buffer finds its class"
            );
            assert!(index < 256 && (index, capacity) >= last);
            assert_eq!(index == last.0, capacity == last.1, "one capacity a class");
            last = (index, capacity);
        }
    }

    #[test]
    fn tensors_reuse_memory() {
        let arena = Arc::new(Arena::new());
        let first = values(&arena.tensor(3, 100)).as_ptr();
        assert_eq!(values(&arena.tensor(2, 150)).as_ptr(), first);
    }

    #[test]
    fn fewer_rows_take_the_buffers_of_more_and_more_replace_those_of_fewer() {
        let arena = Arc::new(Arena::new());
        let kept = || {
            let free = arena.free.lock().unwrap();
            let lines = |s: &Storage| s.downcast_ref::<Buffer>().unwrap().lines.len();
            free.iter().flatten().map(lines).collect::<Vec<_>>()
        };
        // Three chunks of a prompt, the last with fewer rows: two tensors at once.
        for rows in [200, 256, 130] {
            let _two = [arena.tensor(rows, 512), arena.tensor(rows, 512)];
        }
        assert_eq!(kept(), [8192, 8192]);
        // A small tensor has a buffer of its own class.
        drop(arena.tensor(1, 512));
        assert_eq!(kept(), [32, 8192, 8192]);
    }

    // Other architectures run emulated, where the maps are the emulator's.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[test]
    fn large_regions_ask_for_large_pages_and_sparse_ones_if_they_are_larger() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let asks = |region: &Region| {
            let at = region.elements::<u8>().as_ptr() as usize;
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let hex = |text: &str| usize::from_str_radix(text, 16).ok();
            let starts = |line: &str| {
                let (start, end) = line.split(' ').next()?.split_once('-')?;
                Some((hex(start)?..hex(end)?).contains(&at))
            };
            let mut lines = maps.lines().skip_while(|line| starts(line) != Some(true));
            let flags = lines.find(|line| line.starts_with("VmFlags:"));
            flags.is_some_and(|f| f.split(' ').any(|f| f == "hg"))
        };
        assert!(asks(&Region::zeroed(4 * HUGE_PAGE)));
        assert!(!asks(&Region::sparse(SPARSE - HUGE_PAGE).unwrap()));
        assert!(asks(&Region::sparse(SPARSE).unwrap()));
    }

    #[test]
    fn regions_are_aligned_zeros() {
        for len in [1, 64, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut region = Region::zeroed(len);
            assert!(region.elements::<u8>().iter().all(|&b| b == 0));
            assert_eq!(
                region.elements::<u8>().as_ptr() as usize
                    % if len < HUGE_PAGE { LINE } else { HUGE_PAGE },
                0
            );
            region.elements_mut::<u8>().fill(1);
        }
    }
}
