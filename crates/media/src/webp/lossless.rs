//! The beginning of the lossless format of WebP, up to the numbers of the sets of Huffman codes.
//!
//! ```text
//! [size] { transform [picture] } [color cache] is there more than one set? ─ yes ─→ picture of numbers
//! picture = [color cache] 5 Huffman codes, { pixel | copy of earlier ones | color of the cache }
//! ```

use crate::deadline::Deadline;

/// Symbols of the codes for green, red, blue, alpha and distances; those of green have colors of the
/// cache after them.
const ALPHABETS: [usize; 5] = [GREENS + LENGTHS, 256, 256, 256, 40];
/// Values of green.
const GREENS: usize = 256;
/// Symbols for lengths of copies, after those.
const LENGTHS: usize = 24;
/// In which order the lengths of the code come by which lengths of codes are written.
const ORDER: [usize; 19] = [
    17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
];
/// The longest code.
const LONGEST: usize = 15;
/// How far to the left, and up, the nearest pixels are that have a distance of their own.
const NEAR: [(i8, i8); 120] = near();
/// Pixels between two looks at the clock.
const STEP: usize = 1 << 14;

/// Bits, the lowest of each byte first.
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
    deadline: Deadline,
}

impl<'a> Bits<'a> {
    /// The bits of `bytes`, which can be read until `deadline`.
    pub(super) fn new(bytes: &'a [u8], deadline: Deadline) -> Bits<'a> {
        Bits {
            bytes,
            at: 0,
            deadline,
        }
    }

    /// Width and height, where the picture has a header.
    pub(super) fn size(&mut self) -> Option<[u32; 2]> {
        let signature = self.take(8)?;
        let size = [self.take(14)? + 1, self.take(14)? + 1];
        // Whether it has alpha, and a version.
        self.take(4)?;
        (signature == 0x2f).then_some(size)
    }

    /// How many sets of Huffman codes the picture of `size`, width and height, asks for; nothing if it is
    /// cut off or odd before that, or time is up. Begins after its header.
    pub(super) fn sets(&mut self, [mut width, height]: [u32; 2]) -> Option<u32> {
        let mut seen = [false; 4];
        while self.flag()? {
            let kind = self.take(2)? as usize;
            if std::mem::replace(&mut seen[kind], true) {
                return None;
            }
            match kind {
                0 | 1 => {
                    let block = self.take(3)? + 2;
                    self.picture(blocks(width, block), blocks(height, block))?;
                }
                2 => {}
                _ => {
                    let colors = self.take(8)? + 1;
                    self.picture(colors, 1)?;
                    let packed = match colors {
                        1..=2 => 3,
                        3..=4 => 2,
                        5..=16 => 1,
                        _ => 0,
                    };
                    width = blocks(width, packed);
                }
            }
        }
        self.cache()?;
        if !self.flag()? {
            return Some(1);
        }
        let block = self.take(3)? + 2;
        let numbers = self.picture(blocks(width, block), blocks(height, block))?;
        // Red and green are a number.
        let most = numbers.iter().map(|pixel| pixel >> 8 & 0xffff).max();
        Some(most? + 1)
    }

    /// The next `n` bits, at most 32; nothing if there are fewer.
    fn take(&mut self, n: u32) -> Option<u32> {
        let mut value = 0;
        for i in 0..n {
            let byte = self.bytes.get(self.at / 8)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << i;
            self.at += 1;
        }
        Some(value)
    }

    fn flag(&mut self) -> Option<bool> {
        Some(self.take(1)? == 1)
    }

    /// How many bits the number of a color of the cache has; 0 without a cache.
    fn cache(&mut self) -> Option<u32> {
        match self.flag()? {
            false => Some(0),
            true => self.take(4).filter(|bits| (1..=11).contains(bits)),
        }
    }

    /// A picture that is not cut into blocks: its pixels as alpha, red, green and blue.
    fn picture(&mut self, width: u32, height: u32) -> Option<Vec<u32>> {
        let cache_bits = self.cache()?;
        let colors = (1 << cache_bits) * usize::from(cache_bits > 0);
        let mut codes = Vec::new();
        for (i, alphabet) in ALPHABETS.into_iter().enumerate() {
            let more = if i == 0 { colors } else { 0 };
            codes.push(Code::read(self, alphabet + more)?);
        }
        let [green, red, blue, alpha, distance] = &codes[..] else {
            return None;
        };
        let mut cache = vec![0u32; colors];
        let (width, n) = (width as usize, width as usize * height as usize);
        let mut pixels: Vec<u32> = Vec::new();
        let mut looked = 0;
        while pixels.len() < n {
            if pixels.len() >= looked {
                self.deadline.check().ok()?;
                looked = pixels.len() + STEP;
            }
            let before = pixels.len();
            match green.symbol(self)? {
                value if value < GREENS => {
                    let [red, blue, alpha] = [red, blue, alpha].map(|code| code.symbol(self));
                    let others = alpha? << 24 | red? << 16 | blue?;
                    pixels.push((others | value << 8) as u32);
                }
                length if length < GREENS + LENGTHS => {
                    let length = self.number(length - GREENS)?;
                    let place = distance.symbol(self)?;
                    let place = self.number(place)?;
                    let back = back(place, width);
                    if back > before || length > n - before {
                        return None;
                    }
                    pixels.extend((0..length).map(|_| 0));
                    for i in before..before + length {
                        pixels[i] = pixels[i - back];
                    }
                }
                color => pixels.push(*cache.get(color - GREENS - LENGTHS)?),
            }
            if colors > 0 {
                for &pixel in &pixels[before..] {
                    let place = 0x1e35_a7bdu32.wrapping_mul(pixel) >> (32 - cache_bits);
                    cache[place as usize] = pixel;
                }
            }
        }
        Some(pixels)
    }

    /// The number, from 1, that `symbol` begins: the rest of it is in bits.
    fn number(&mut self, symbol: usize) -> Option<usize> {
        if symbol < 4 {
            return Some(symbol + 1);
        }
        let extra = (symbol - 2) >> 1;
        let first = (2 + (symbol & 1)) << extra;
        Some(first + self.take(extra as u32)? as usize + 1)
    }
}

/// Blocks of `1 << bits` pixels a side that cover `side` pixels.
fn blocks(side: u32, bits: u32) -> u32 {
    side.div_ceil(1 << bits)
}

/// How many pixels before a pixel the one is that has number `place`, in rows of `width`.
fn back(place: usize, width: usize) -> usize {
    match NEAR.get(place - 1) {
        None => place - NEAR.len(),
        Some(&(left, up)) => {
            let back = isize::from(left) + isize::from(up) * width as isize;
            usize::try_from(back).unwrap_or_default().max(1)
        }
    }
}

/// The places of [`NEAR`], in the order of the format's specification.
const fn near() -> [(i8, i8); 120] {
    // One byte each: how far up, and 8 less how far to the left.
    const PACKED: &[u8; 120] = b"\x18\x07\x17\x19\x28\x06\x27\x29\x16\x1a\x26\x2a\
        \x38\x05\x37\x39\x15\x1b\x36\x3a\x25\x2b\x48\x04\
        \x47\x49\x14\x1c\x35\x3b\x46\x4a\x24\x2c\x58\x45\
        \x4b\x34\x3c\x03\x57\x59\x13\x1d\x56\x5a\x23\x2d\
        \x44\x4c\x55\x5b\x33\x3d\x68\x02\x67\x69\x12\x1e\
        \x66\x6a\x22\x2e\x54\x5c\x43\x4d\x65\x6b\x32\x3e\
        \x78\x01\x77\x79\x53\x5d\x11\x1f\x64\x6c\x42\x4e\
        \x76\x7a\x21\x2f\x75\x7b\x31\x3f\x63\x6d\x52\x5e\
        \x00\x74\x7c\x41\x4f\x10\x20\x62\x6e\x30\x73\x7d\
        \x51\x5f\x40\x72\x7e\x61\x6f\x50\x71\x7f\x60\x70";
    let mut places = [(0, 0); 120];
    let mut i = 0;
    while i < places.len() {
        places[i] = (8 - (PACKED[i] & 15) as i8, (PACKED[i] >> 4) as i8);
        i += 1;
    }
    places
}

/// A Huffman code: symbols in the order of their codes, and how many have each length.
struct Code {
    lengths: [usize; LONGEST + 1],
    symbols: Vec<usize>,
}

impl Code {
    /// Reads the code of an alphabet of `n` symbols.
    fn read(bits: &mut Bits<'_>, n: usize) -> Option<Code> {
        if bits.flag()? {
            let two = bits.flag()?;
            let wide = bits.flag()?;
            let first = bits.take(if wide { 8 } else { 1 })? as usize;
            let second = if two {
                Some(bits.take(8)? as usize)
            } else {
                None
            };
            let symbols: Vec<usize> = [first].into_iter().chain(second).collect();
            let mut lengths = [0; LONGEST + 1];
            lengths[1] = symbols.len();
            let is_in = symbols.iter().all(|&symbol| symbol < n);
            return is_in.then_some(Code { lengths, symbols });
        }
        let mut lengths = [0; ORDER.len()];
        for place in &ORDER[..bits.take(4)? as usize + 4] {
            lengths[*place] = bits.take(3)? as usize;
        }
        let code = Code::of(&lengths)?;
        let mut most = n;
        if bits.flag()? {
            let width = 2 + 2 * bits.take(3)?;
            most = 2 + bits.take(width)? as usize;
        }
        let (mut lengths, mut last) = (vec![0; n], 8);
        let mut at = 0;
        // Each symbol that is read counts, not what it stands for.
        for _ in 0..most {
            if at >= n {
                break;
            }
            let (length, times) = match code.symbol(bits)? {
                16 => (last, 3 + bits.take(2)?),
                17 => (0, 3 + bits.take(3)?),
                18 => (0, 11 + bits.take(7)?),
                length => (length, 1),
            };
            if length > 0 {
                last = length;
            }
            let end = at + times as usize;
            lengths.get_mut(at..end)?.fill(length);
            at = end;
        }
        Code::of(&lengths)
    }

    /// The code in which symbols have codes of these lengths; 0 where they have none. It must have a
    /// symbol for all bits, or one symbol.
    fn of(lengths: &[usize]) -> Option<Code> {
        let mut counts = [0; LONGEST + 1];
        for &length in lengths.iter().filter(|&&length| length > 0) {
            counts[length] += 1;
        }
        let mut symbols: Vec<usize> = (0..lengths.len()).filter(|&i| lengths[i] > 0).collect();
        symbols.sort_by_key(|&symbol| lengths[symbol]);
        let share = |length: usize| counts[length] << (LONGEST - length);
        let is_whole = (1..=LONGEST).map(share).sum::<usize>() == 1 << LONGEST;
        (is_whole || symbols.len() == 1).then_some(Code {
            lengths: counts,
            symbols,
        })
    }

    /// The next symbol; one that is alone has no bits.
    fn symbol(&self, bits: &mut Bits<'_>) -> Option<usize> {
        if let [only] = self.symbols[..] {
            return Some(only);
        }
        let (mut code, mut first, mut at) = (0, 0, 0);
        for n in &self.lengths[1..] {
            code |= bits.take(1)? as usize;
            if code < first + n {
                return self.symbols.get(at + code - first).copied();
            }
            at += n;
            first = (first + n) << 1;
            code <<= 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_places_are_those_of_the_format() {
        assert_eq!(NEAR[..6], [(0, 1), (1, 0), (1, 1), (-1, 1), (0, 2), (2, 0)]);
        assert_eq!(NEAR[116..], [(7, 7), (-7, 7), (8, 6), (8, 7)]);
        assert_eq!([back(1, 10), back(2, 10), back(121, 10)], [10, 1, 1]);
        // What would be behind the pixel is the one before it.
        assert_eq!(back(4, 1), 1);
    }
}
