// Speculation made visible: which token of an answer was guessed, by whom and how far ahead, and
// what that was worth. The server says so, round by round, to a request with `speculation.trace`.
import { el, plural } from './dom.js'

const NAMES = { mtp: 'MTP head', assistant: 'assistant', eagle3: 'EAGLE-3 head', model: 'draft model', ngram: 'repetition', grammar: 'grammar' }
const STEPS_SHOWN = 6

export const nameOf = (drafter) => NAMES[drafter] ?? drafter

const who = (token) => (token.forced ? 'grammar' : token.drafter)

function titleOf(token, round) {
  if (token.position === 0) return round.round === 0 ? 'the first token, from the prompt' : `round ${round.round}: the model’s own token; ${round.accepted} of ${round.drafted} guessed before it stayed`
  const by = token.forced ? 'forced by the grammar' : `guessed by the ${nameOf(token.drafter)}`
  return `round ${round.round}: token ${token.position} of ${round.drafted}, ${by}`
}

// Where in `text` the tokens of a channel stand: `{start, end, kind, title}`, in order. The text of
// a channel may lack white space at its ends and a stop string at its end.
export function spans(rounds, text, channel) {
  const found = []
  let at = 0
  for (const round of rounds) {
    for (const token of round.tokens) {
      if (token.channel !== channel || !token.text) continue
      let piece = token.text
      if (!text.startsWith(piece, at)) piece = piece.trimStart()
      if (!piece) continue
      const left = text.length - at
      if (!text.startsWith(piece, at) && !(left < piece.length && piece.startsWith(text.slice(at)))) continue
      const end = Math.min(at + piece.length, text.length)
      const kind = token.position === 0 ? null : `${who(token)} p${Math.min(token.position, STEPS_SHOWN)}`
      found.push({ start: at, end, kind, title: titleOf(token, round) })
      at = end
    }
  }
  return found
}

const isSpace = (c) => c === ' ' || c === '\n' || c === '\t'

// Tints the text in `root`, which was made of `source`, a part of an answer that begins at
// `offset`. What is shown is `source` without its markup, so each character is looked for in turn.
export function tint(root, source, offset, tokens) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest('[data-aside]') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT)
  const nodes = []
  while (walker.nextNode()) nodes.push(walker.currentNode)
  let at = 0
  let next = tokens.findIndex((token) => token.end > offset)
  if (next < 0) return
  for (const node of nodes) {
    const pieces = []
    // By code units: no token ends inside a character.
    for (let i = 0; i < node.data.length; i++) {
      const c = node.data[i]
      let there = at
      while (there < source.length && source[there] !== c && !(isSpace(c) && isSpace(source[there]))) there++
      if (there < source.length) at = there + 1
      const place = offset + at - 1
      while (next < tokens.length - 1 && tokens[next].end <= place) next++
      const token = tokens[next].start <= place && place < tokens[next].end ? tokens[next] : null
      const last = pieces.at(-1)
      if (last && last.token === token) last.text += c
      else pieces.push({ token, text: c })
    }
    const made = pieces.map(({ token, text }) => (token ? el('span', { className: token.kind ? `t ${token.kind}` : 'own', title: token.title }, text) : text))
    node.replaceWith(...made)
  }
}

// What an answer's speculation came to; nothing where none was recorded.
export function worth({ record, twin }) {
  const s = record?.speculation
  if (!s) return null
  const acceptance = s.drafted ? s.accepted / s.drafted : 0
  const measured = twin?.record ? twin.record.timings.predicted_ms - record.timings.predicted_ms : null
  // Every accepted token would have been a step of its own, which takes no longer than one that
  // checks a draft.
  const bound = s.rounds && s.engaged ? (s.accepted * s.ms_verify) / s.rounds - s.ms_draft : null
  return { ...s, acceptance, measured, bound, ms: record.timings.predicted_ms, n: record.timings.predicted_n, rate: record.timings.predicted_per_second }
}

const fixed = (x, digits = 0) => x.toLocaleString('en', { maximumFractionDigits: digits, minimumFractionDigits: digits })
const percent = (x) => `${fixed(100 * x)}\u202f%`
export const milliseconds = (ms) => (Math.abs(ms) >= 1000 ? `${fixed(ms / 1000, 2)} s` : `${fixed(ms)} ms`)

function saving(of) {
  const ms = of.measured ?? of.bound
  if (ms === null || (of.measured === null && ms <= 0)) return null
  const upTo = of.measured === null ? 'up to ' : ''
  return { text: `${upTo}${milliseconds(Math.abs(ms))}`, label: ms < 0 ? 'lost' : 'saved' }
}

// The line below an answer.
export function summary(of) {
  const parts = [plural(of.n, 'token')]
  if (of.rate) parts.push(`${fixed(of.rate)} a second`)
  if (of.engaged) {
    parts.push(`${fixed(of.tokens_per_round, 1)} a round`, `${percent(of.acceptance)} accepted`)
    const saved = saving(of)
    if (saved) parts.push(`${saved.text} ${saved.label}`)
  } else parts.push('no speculation')
  return parts.join(' · ')
}

const key = (kind, text) => el('span', {}, el('i', { className: `key ${kind}` }), text)

// The colors that stand in an answer.
function legend(of, rounds) {
  const tokens = rounds.flatMap((round) => round.tokens)
  const deepest = Math.min(STEPS_SHOWN, Math.max(0, ...tokens.filter((t) => t.drafter).map((t) => t.position)))
  const keys = Array.from({ length: deepest }, (_, i) => key(`${of.drafter} p${i + 1}`, i === 0 ? `1st guess of the ${nameOf(of.drafter)}` : `${i + 1}${['', 'nd', 'rd'][i] ?? 'th'}`))
  if (tokens.some((token) => token.forced)) keys.push(key('grammar p2', 'forced by the grammar'))
  return el('div', { className: 'legend' }, key('target', 'the model’s own'), ...keys)
}

const fact = (name, value, more) => el('div', {}, el('dt', {}, name), el('dd', {}, value, more && el('small', {}, ` ${more}`)))

// The whole account of an answer's speculation.
export function report(node) {
  const of = worth(node)
  if (!of) return null
  if (!of.engaged) return el('div', { className: 'report' }, el('p', {}, `Nothing was guessed: ${of.reason ?? 'speculation was off'}.`))
  const saved = saving(of)
  const facts = [
    fact('Tokens a round', fixed(of.tokens_per_round, 2), 'instead of 1'),
    fact('Accepted', percent(of.acceptance), `${of.accepted} of ${of.drafted}`),
    fact('Rounds', fixed(of.rounds), `for ${plural(of.n, 'token')}`),
    saved && fact(saved.label === 'saved' ? 'Saved' : 'Lost', saved.text.replace('up to ', '≤ '), of.measured === null ? 'not measured' : 'measured'),
    of.forced && fact('Forced', fixed(of.forced), 'by the grammar'),
  ]
  const positions = of.by_position.map(({ drafted, accepted }, i) => el(
    'div', {}, `Guess ${i + 1}: ${percent(drafted ? accepted / drafted : 0)}`,
    el('meter', { value: drafted ? accepted / drafted : 0, 'aria-label': `Guess ${i + 1} accepted` }),
  ))
  const note = of.measured === null
    ? 'Each accepted token spared a step, at most as long as one that checks a draft. Compare with speculation off to measure the time.'
    : null
  return el(
    'div', { className: `report ${of.drafter ?? ''}` }, legend(of, node.rounds ?? []),
    el('dl', { className: 'facts' }, ...facts.filter(Boolean)),
    el('div', { className: 'positions' }, ...positions), note && el('p', {}, note),
  )
}

// Where two texts part, or -1.
export function difference(a, b) {
  if (a === b) return -1
  let i = 0
  while (i < a.length && a[i] === b[i]) i++
  return i
}

// What is said below an answer and its twin without speculation.
export function verdict(node) {
  const { twin } = node
  if (!twin.record) return null
  const parts = difference(node.content + (node.reasoning ?? ''), twin.content + (twin.reasoning ?? ''))
  if (parts >= 0) {
    const why = node.record.speculation.accept === 'residual'
      ? 'The server was started with --accept residual, which gives up equal texts at a temperature above 0.'
      : 'They should be equal: please report this, with the seed and the model.'
    return el('p', { className: 'verdict unequal' }, el('b', {}, `The texts differ from character ${parts + 1} on.`), ` ${why}`)
  }
  const of = worth(node)
  const times = twin.record.timings.predicted_ms / Math.max(of.ms, 1e-9)
  const gain = of.measured >= 0
    ? [el('b', {}, `${milliseconds(of.measured)} saved`), `, ${fixed(times, 2)} times as fast`]
    : [el('b', {}, `${milliseconds(-of.measured)} lost`), ': guessing did not pay here']
  return el('p', { className: 'verdict equal' }, el('b', {}, '✓ The same text'), `, all ${plural(of.n, 'token')} of it. `, ...gain, twin.isBeside ? ', while both shared the machine.' : '.')
}
