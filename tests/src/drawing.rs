//! Pictures of shapes, letters and boxes, with the pixels that `tests/golden/caption.py` draws.
//!
//! ```text
//! mark = [kind, left, top, width, height, red, green, blue]     in whole pixels
//! ```
//!
//! A pixel belongs to a mark by integers alone.

use engine::Frame;
use serde_json::Value;

/// Kinds of marks from here on are letters and digits.
const FIRST_LETTER: i64 = 7;

/// Seven rows a letter, each of five columns as a digit of base 32, and the next letter.
const FONT: &str = "EHHVHHH UHHUHHU EHGGGHE UHHHHHU VGGUGGV VGGUGGG EHGNHHF HHHVHHH E44444E \
                    72222IC HIKOKIH GGGGGGV HRLLHHH HPPLJJH EHHHHHE UHHUGGG EHHHLID UHHUKIH \
                    FGGE11U V444444 HHHHHHE HHHHHA4 HHHLLRH HHA4AHH HHA4444 V1248GV \
                    EHJLPHE 4C4444E EH168GV U11E11U 26AIV22 VGU11HE 68GUHHE V124888 EHHEHHE EHHF12C";

/// Corners of a star, a thousand from the middle.
const STAR: &[[i64; 2]] = &[
    [0, 1000],
    [247, 340],
    [951, 309],
    [399, -130],
    [588, -809],
    [0, -420],
    [-588, -809],
    [-399, -130],
    [-951, 309],
    [-247, 340],
];

/// Corners of a triangle.
const TRIANGLE: &[[i64; 2]] = &[[0, 950], [949, -900], [-949, -900]];

/// The frames of a scene.
///
/// # Panics
///
/// If it is none.
pub fn draw(scene: &Value) -> Vec<Frame> {
    let [height, width] = numbers(&scene["size"]);
    let ground: [i64; 3] = numbers(&scene["ground"]);
    let ground = ground.map(|color| color as u8);
    let frames = scene["frames"].as_array().expect("a list of frames");
    let draw = |marks: &Value| {
        let mut rgb = ground.repeat((height * width) as usize);
        for mark in marks.as_array().expect("a list of marks") {
            put(&mut rgb, [height, width], numbers(mark));
        }
        Frame::new(height as usize, width as usize, rgb)
    };
    frames.iter().map(draw).collect()
}

fn numbers<const N: usize>(list: &Value) -> [i64; N] {
    let list = list.as_array().expect("a list of numbers");
    let numbers = list.iter().map(|n| n.as_i64().expect("a whole number"));
    let numbers: Vec<i64> = numbers.collect();
    numbers.try_into().expect("as many as there should be")
}

fn put(rgb: &mut [u8], [height, width]: [i64; 2], mark: [i64; 8]) {
    let [kind, left, top, w, h, red, green, blue] = mark;
    for y in (-top).max(0)..h.min(height - top) {
        for x in (-left).max(0)..w.min(width - left) {
            if is_inside(kind, [x, y], [w, h]) {
                let at = 3 * ((top + y) * width + left + x) as usize;
                rgb[at..at + 3].copy_from_slice(&[red, green, blue].map(|color| color as u8));
            }
        }
    }
}

/// Whether column `x` and row `y` of a mark's box belong to it.
fn is_inside(kind: i64, [x, y]: [i64; 2], [width, height]: [i64; 2]) -> bool {
    // From the middle, in half pixels, y upwards.
    let (u, v) = (2 * x + 1 - width, height - 2 * y - 1);
    let (near, far) = (u.abs().min(v.abs()), u.abs().max(v.abs()));
    match kind {
        1 => (u * u + v * v) * 100 < 98 * width * width,
        2 => 10 * far < 9 * width,
        3 => is_in_polygon(TRIANGLE, [u, v], width),
        4 => is_in_polygon(STAR, [u, v], width),
        5 => 100 * near < 32 * width && 100 * far < 95 * width,
        6 => {
            let [a, b, s] = [125 * u, 120 * v, 100 * width].map(i128::from);
            (a * a + b * b - s * s).pow(3) < a * a * b * b * b * s
        }
        kind => {
            let letter = (kind - FIRST_LETTER) as usize;
            // After the letters comes a filled box.
            let Some(rows) = FONT.split_whitespace().nth(letter) else {
                return true;
            };
            let row = rows.as_bytes()[(y * 7 / height) as usize];
            let row = char::from(row).to_digit(32).expect("a digit of base 32");
            row >> (4 - x * 5 / width) & 1 == 1
        }
    }
}

/// Whether a point, of -side to side, lies in a polygon, by the parity of crossings.
fn is_in_polygon(corners: &[[i64; 2]], [u, v]: [i64; 2], side: i64) -> bool {
    let next = corners.iter().cycle().skip(1);
    let crosses = |(&[ax, ay], &[bx, by]): (&[i64; 2], &[i64; 2])| {
        if (ay * side > v * 1000) == (by * side > v * 1000) {
            return false;
        }
        // Left of the edge at this height.
        let left = (u * 1000 - ax * side) * (by - ay) - (v * 1000 - ay * side) * (bx - ax);
        match by > ay {
            true => left < 0,
            false => left > 0,
        }
    };
    let crossings = corners.iter().zip(next).filter(|&edge| crosses(edge));
    crossings.count() % 2 == 1
}
