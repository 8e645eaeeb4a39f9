//! The support: the tokens that noise decides between, and how likely each of them is.

use super::key::{Key, best_of_keys, truncate};
use super::mirostat::{Mirostat, bound};
use super::row::Row;
use super::{History, MAX_VOCAB, Sampling, Scratch, TokenProbs};
use crate::noise::Noise;
use backend::math::exp;
use backend::moments::{Deviation, Surprise};

/// The tokens that noise decides between.
pub(super) enum Support<'a> {
    /// One token, which needs no noise.
    One(u32),
    /// Several tokens, or one, in no order.
    Keys(&'a mut [Key]),
}

impl Support<'_> {
    /// The token that `noise` chooses.
    pub(super) fn choose(&self, noise: &Noise) -> u32 {
        match self {
            Support::One(token) => *token,
            Support::Keys(keys) => best_of_keys(keys, noise),
        }
    }

    /// How likely each token is to be chosen: `softmax(z)`, in the keys' order.
    pub(super) fn probs(&self) -> TokenProbs {
        let keys = match self {
            Support::One(token) => return vec![(*token, 1.0)],
            Support::Keys(keys) => keys,
        };
        let top = keys.iter().min().expect("a support is not empty").z();
        let masses = keys.iter().map(|key| exp(key.z() - top));
        let total: f64 = masses.clone().map(f64::from).sum();
        let probs = masses.map(|mass| (f64::from(mass) / total) as f32);
        keys.iter().map(|key| key.id()).zip(probs).collect()
    }
}

/// The support among the whole vocabulary.
pub(super) fn support<'a>(
    sampling: &Sampling,
    history: &History,
    position: u64,
    logits: &[f32],
    scratch: &'a mut Scratch,
) -> Support<'a> {
    let Scratch {
        edited,
        repeats,
        maxima,
        ranked,
        keys,
        ..
    } = scratch;
    let row = Row::new(sampling, history, logits, edited, repeats, maxima);
    match row.scale(sampling) {
        None => Support::One(row.argmax()),
        Some(scale) => Support::Keys(row.support(sampling, position, scale, ranked, keys)),
    }
}

/// The support among the tokens `ids`, `logits[i]` being that of token `ids[i]`.
///
/// # Panics
///
/// If there are no ids, or more than [`MAX_VOCAB`], or not as many as logits.
pub(super) fn support_among<'a>(
    sampling: &Sampling,
    history: &History,
    position: u64,
    ids: &[u32],
    logits: &[f32],
    scratch: &'a mut Scratch,
) -> Support<'a> {
    assert_eq!(ids.len(), logits.len(), "a logit for each id");
    assert!((1..=MAX_VOCAB).contains(&ids.len()), "a vocabulary");
    let Scratch {
        edited: buffer,
        repeats,
        keys,
        places,
        ..
    } = scratch;
    let row = if sampling.edits_logits() {
        place(ids, places);
        let row = sampling.edited(history, logits, buffer, repeats, |token| {
            let place = *places.get(token as usize)?;
            (place as usize).checked_sub(1)
        });
        for &id in ids {
            places[id as usize] = 0;
        }
        row
    } else {
        logits
    };
    let fill = |keys: &mut Vec<Key>, scale: f32| {
        keys.clear();
        let scaled = row.iter().zip(ids).map(|(&l, &id)| (l * scale, id));
        // Neither -inf nor what is not a number.
        keys.extend(scaled.filter(|&(z, _)| z >= f32::MIN).map(Key::new));
        keys.iter().min().copied()
    };
    let Some(first) = fill(keys, 1.0) else {
        return Support::One(*ids.iter().min().expect("at least one"));
    };
    let unscaled = first.z();
    let surprise = || {
        let mut surprise = Surprise::default();
        surprise.extend(unscaled, keys.iter().map(|key| key.z()));
        (keys.len(), surprise)
    };
    let Some(scale) = sampling.scale(unscaled, surprise) else {
        return Support::One(first.id());
    };
    let Some(first) = fill(keys, scale) else {
        return Support::One(first.id());
    };
    if sampling.mirostat != Mirostat::Off {
        let keep = bound(sampling, history.bound(), ids.len(), first.z(), keys);
        return Support::Keys(&mut keys[..keep]);
    }
    let sigma = || Deviation::of(unscaled, row.iter().copied()).sigma();
    let floor = sampling.sigma_cut(first.z(), scale, sigma);
    if floor > f32::MIN {
        keys.retain(|key| key.z() >= floor);
    }
    let keep = truncate(sampling, position, first.z(), None, keys);
    Support::Keys(&mut keys[..keep])
}

/// Sets `places[id]` to the place of each of `ids`, plus one; the others are 0.
fn place(ids: &[u32], places: &mut Vec<u32>) {
    let n_places = *ids.iter().max().expect("at least one") as usize + 1;
    if places.len() < n_places {
        places.resize(n_places, 0);
    }
    for (place, &id) in (1..).zip(ids) {
        places[id as usize] = place;
    }
}
