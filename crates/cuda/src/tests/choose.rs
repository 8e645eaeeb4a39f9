//! Which tokens rows of logits give, and masks.

use super::gpu;
use crate::{Cuda, DryRun};
use backend::{Backend, Edit, Record, RowEdits, Sample, Store, TokenChoice, TokenList, TokenMask};

/// Tokens that stay on the device, chosen in every way, among all columns and among some.
#[test]
fn gpu_rows_without_a_token_are_told() {
    let Some(cuda) = gpu() else { return };
    let b: &dyn Backend = &cuda;
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for cols in [5, 2048, 5000] {
        let sound: Vec<f32> = (0..cols).map(|i| (i * 37 % 101) as f32 * 0.1).collect();
        let with = |at: usize, value: f32| {
            let mut row = sound.clone();
            row[at] = value;
            row
        };
        let mut rows = vec![sound.clone(), with(0, -inf), vec![-inf; cols]];
        for at in [0, cols / 2, cols - 1] {
            rows.extend([nan, -nan, inf].map(|value| with(at, value)));
        }
        let x = b.upload(rows.len(), cols, &rows.concat());
        let want: Vec<bool> = rows.iter().map(|row| backend::gives_token(row)).collect();
        let told = |tokens: Vec<u32>| -> Vec<bool> {
            tokens.iter().map(|&t| t != backend::NO_TOKEN).collect()
        };
        assert_eq!(told(b.argmax(&x)), want, "argmax of {cols}");
        let ids = (0..cols as u32).map(|i| 3 * i).collect();
        for list in [None, Some(TokenList::new(b, ids))] {
            for (scale, top_p, top_k) in
                [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.9, 0), (1e-3, 0.9, 3)]
            {
                let choice = TokenChoice {
                    seed: 1,
                    position: 2,
                    scale,
                    top_p,
                    ln_min_p: f32::NEG_INFINITY,
                    top_k,
                    floor: f32::MIN,
                };
                let tokens = b.choose_tokens(&x, list.as_ref(), &vec![choice; rows.len()]);
                let tokens = tokens.expect("a device that chooses");
                assert_eq!(told(tokens), want, "{cols}, {scale} {top_p} {top_k}");
            }
        }
    }
    cuda.finish().unwrap();
}

/// Needs no GPU: what a GPU would be asked to launch.
#[test]
fn masks_are_one_launch_and_rows_without_them_none() {
    let cuda = Cuda::dry_run(DryRun::default());
    let cols = 5000;
    let some = TokenMask::new(cols, [1, 4999]);
    let masked = |masks: &[Option<TokenMask>]| {
        let x = cuda.upload(masks.len(), cols, &vec![0.0; masks.len() * cols]);
        cuda.take_launches();
        let masked = cuda.mask_logits(x, masks);
        assert_eq!((masked.rows(), masked.cols()), (masks.len(), cols));
        cuda.take_launches()
    };
    assert_eq!(masked(&[None, None]), [""; 0]);
    let other = TokenMask::new(cols, [2]);
    let launches = masked(&[None, Some(some.clone()), Some(some), Some(other)]);
    assert_eq!(
        launches,
        ["choose::mask_logits <<<3x4, 256, 0, 1>>> (@, @, 1388)"]
    );
    assert!(cuda.capabilities().masks);
}

/// Needs no GPU: what a GPU would be asked to launch.
#[test]
fn edits_are_one_launch_and_rows_without_them_none() {
    let cuda = Cuda::dry_run(DryRun::default());
    let cols = 5000;
    let edited = |edits: &[RowEdits]| {
        let x = cuda.upload(edits.len(), cols, &vec![0.0; edits.len() * cols]);
        cuda.take_launches();
        let edited = cuda.edit_logits(x, edits);
        assert_eq!((edited.rows(), edited.cols()), (edits.len(), cols));
        cuda.take_launches()
    };
    let none = RowEdits::default();
    assert_eq!(edited(&[none.clone(), none.clone()]), [""; 0]);
    let many = (0..600).map(|column| (column, Edit::Divide(1.1))).collect();
    let one = RowEdits::new(vec![(4999, Edit::Suppress)]);
    assert_eq!(
        edited(&[one, none, RowEdits::new(many)]),
        ["choose::edit_logits <<<3x3, 256, 0, 1>>> (@, @, 1388)"]
    );
    assert!(cuda.capabilities().edits);
}
