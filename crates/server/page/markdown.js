// Markdown as elements: headings, lists, tables, quotes, code, emphasis, links. What a model
// writes becomes text nodes, so nothing of it is ever markup.
import { copy, el } from './dom.js'

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$/
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/
const QUOTE = /^ {0,3}> ?/
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])(?:[ \t]+|$)/
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/
const NESTING_MAX = 12

const isBlank = (line) => line.trim() === ''
const indent = (line) => line.length - line.trimStart().length

// Whether a line ends the paragraph before it.
function interrupts(line) {
  const item = ITEM.exec(line)
  const begins = item && line.length > item[0].length && (item[2] || item[3] === '1')
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || begins
}

// The top-level blocks of a text: the lines of each, so that one that stays need not be made again.
export function split(text) {
  const lines = text.split('\n')
  const blocks = []
  let at = 0
  let offset = 0
  while (at < lines.length) {
    const n = isBlank(lines[at]) ? 1 : extent(lines, at)
    const source = lines.slice(at, at + n).join('\n')
    if (!isBlank(lines[at])) blocks.push({ source, offset })
    offset += source.length + 1
    at += n
  }
  return blocks
}

// How many lines the block at `at` has.
function extent(lines, at) {
  const line = lines[at]
  const fence = FENCE.exec(line)
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`)
    const end = lines.findIndex((other, i) => i > at && close.test(other))
    return (end < 0 ? lines.length : end + 1) - at
  }
  if (HEADING.test(line) || RULE.test(line)) return 1
  let end = at + 1
  if (QUOTE.test(line)) {
    while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !interrupts(lines[end]))) end++
    return end - at
  }
  if (ITEM.test(line)) {
    for (; end < lines.length; end++) {
      if (!isBlank(lines[end])) {
        const goesOn = ITEM.test(lines[end]) || indent(lines[end]) > 1
        if (!goesOn && (isBlank(lines[end - 1]) || interrupts(lines[end]))) break
      } else if (end + 1 >= lines.length || (isBlank(lines[end + 1]) && !isBlank(lines[end - 1]))) break
    }
    return end - at
  }
  if (line.includes('|') && DIVIDER.test(lines[end] ?? '')) {
    while (end < lines.length && lines[end].includes('|')) end++
    return end - at
  }
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines[end])) end++
  return end - at
}

// The element of one block.
export function block(source, depth = 0) {
  const lines = source.split('\n')
  const [line] = lines
  const fence = FENCE.exec(line)
  if (fence) return code(lines, fence)
  const heading = HEADING.exec(line)
  // The page's own heading is the first of its kind, so a text's begin one lower.
  if (heading) return el(`h${Math.min(6, heading[1].length + 1)}`, {}, ...inline(heading[2]))
  if (RULE.test(line)) return el('hr')
  if (depth < NESTING_MAX) {
    if (QUOTE.test(line)) {
      return el('blockquote', {}, ...all(lines.map((l) => l.replace(QUOTE, '')).join('\n'), depth + 1))
    }
    if (ITEM.test(line)) return list(lines, depth)
  }
  if (line.includes('|') && DIVIDER.test(lines[1] ?? '')) return table(lines)
  return el('p', {}, ...inline(lines.map((l) => l.trimStart()).join('\n')))
}

const all = (text, depth) => split(text).map(({ source }) => block(source, depth))

function code(lines, [, fence, language]) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence)
  const text = lines.slice(1, isClosed ? -1 : undefined).join('\n')
  const button = el('button', { type: 'button', className: 'quiet', 'data-copy': '' }, 'Copy')
  const name = language.trim().split(/\s/)[0]
  return el(
    'div', { className: 'code' },
    el('div', { className: 'code-head', 'data-aside': '' }, el('span', {}, name || 'text'), button),
    el('pre', { tabIndex: 0, 'aria-label': `Code${name ? ` in ${name}` : ''}`, role: 'region' }, el('code', {}, text)),
  )
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0])
  const base = first[1].length
  const isOrdered = first[3] !== undefined
  const items = []
  for (const line of lines) {
    const item = ITEM.exec(line)
    if (item && item[1].length <= base + 1) items.push({ width: item[0].length, lines: [line.slice(item[0].length)] })
    else items.at(-1).lines.push(indent(line) >= 2 ? line.slice(Math.min(indent(line), items.at(-1).width)) : line)
  }
  const isLoose = items.some((item, i) => item.lines.some(isBlank) && (i < items.length - 1 || item.lines.slice(0, -1).some(isBlank)))
  const children = items.map((item) => {
    const task = /^\[([ xX])\] /.exec(item.lines[0])
    if (task) item.lines[0] = item.lines[0].slice(4)
    let inside = all(item.lines.join('\n'), depth + 1)
    if (!isLoose && inside[0]?.tagName === 'P') inside = [...inside[0].childNodes, ...inside.slice(1)]
    const box = task && el('input', { type: 'checkbox', checked: task[1] !== ' ', disabled: true, 'aria-label': task[1] !== ' ' ? 'done' : 'to do' })
    return el('li', { className: task ? 'task' : '' }, box, task && ' ', ...inside)
  })
  return isOrdered ? el('ol', { start: Number(first[3]) }, ...children) : el('ul', {}, ...children)
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, '').replace(/\|$/, '')
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll('\\|', '|'))
}

function table(lines) {
  const kinds = cells(lines[1]).map((cell) => (cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'right') : ''))
  const row = (tag) => (line) => el('tr', {}, ...cells(line).slice(0, kinds.length).map((cell, i) => el(tag, { className: kinds[i] }, ...inline(cell))))
  return el(
    'div', { className: 'table' },
    el('table', {}, el('thead', {}, row('th')(lines[0])), el('tbody', {}, ...lines.slice(2).map(row('td')))),
  )
}

const SAFE = /^(https?:\/\/|mailto:)/i

function link(target, ...children) {
  if (!SAFE.test(target)) return el('span', {}, ...children)
  return el('a', { href: target, rel: 'noopener noreferrer nofollow', target: '_blank' }, ...children)
}

const INLINE = [
  [/^\\([!-/:-@[-`{-~])/, (m) => m[1]],
  [/^(`+)(?!`)([\s\S]*?[^`])\1(?!`)/, (m) => el('code', {}, m[2].replaceAll('\n', ' '))],
  [/^!\[([^\]]*)\]\(<?([^\s)>]+)>?[^)]*\)/, (m) => link(m[2], m[1] || 'picture')],
  [/^\[([^\]\n]+)\]\(<?([^\s)>]+)>?(?:\s+"[^"]*")?\)/, (m, depth) => link(m[2], ...inline(m[1], depth + 1))],
  [/^<(https?:\/\/[^\s<>]+)>/, (m) => link(m[1], m[1])],
  [/^https?:\/\/[^\s<>()"'*`]+[^\s<>()"'*`.,;:!?]/, (m) => link(m[0], m[0])],
  [/^(\*\*|__)(?=\S)([\s\S]*?\S)\1/, (m, depth) => el('strong', {}, ...inline(m[2], depth + 1))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m, depth) => el('del', {}, ...inline(m[1], depth + 1))],
  [/^([*_])(?![\s*_])([\s\S]*?[^\s*_])\1(?![\w*])/, (m, depth) => el('em', {}, ...inline(m[2], depth + 1))],
  [/^(?: {2,}|\\)\n/, () => el('br')],
]
// Characters that may begin one of these.
const SPECIAL = /[\\`![<h*_~ ]/
// Longest stretch that is searched for the end of an emphasis, so that a text of stars costs little.
const REACH = 2000

// The nodes of a line of text.
export function inline(text, depth = 0) {
  const nodes = []
  let plain = ''
  const flush = () => {
    if (plain) nodes.push(plain)
    plain = ''
  }
  for (let at = 0; at < text.length; ) {
    const isWord = /\w/.test(text[at - 1] ?? '')
    const isPlain = text[at] === 'h' ? !text.startsWith('http', at) : text[at] === ' ' ? text[at + 1] !== ' ' : !SPECIAL.test(text[at])
    const rest = isPlain || depth >= NESTING_MAX ? '' : text.slice(at, at + REACH)
    const isInWord = isWord && /^[_h]/.test(rest)
    const found = rest && !isInWord && INLINE.map(([pattern, make]) => [pattern.exec(rest), make]).find(([m]) => m)
    if (!found) {
      plain += text[at++]
      continue
    }
    const made = found[1](found[0], depth)
    if (typeof made === 'string') plain += made
    else {
      flush()
      nodes.push(made)
    }
    at += found[0][0].length
  }
  flush()
  return nodes
}

// Copies the code beside a button that was pressed.
export function copyCode(button) {
  if (button.textContent === 'Copy') copy(button.closest('.code').querySelector('code').textContent, button, 'Copied')
}
