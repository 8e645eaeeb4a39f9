// The list of conversations, and the search over them.
import { $, el, iconButton } from './dom.js'
import { title } from './tree.js'

const DAY = 86_400_000
// Characters shown before and after what was found.
const AROUND = 28

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0)
  if (time >= midnight) return 'Today'
  if (time >= midnight - DAY) return 'Yesterday'
  return time >= midnight - 6 * DAY ? 'This week' : 'Earlier'
}

// The words around the first place of `query` in a text, with it marked.
function excerpt(text, query, around = AROUND) {
  const at = text.toLowerCase().indexOf(query)
  if (at < 0) return null
  const from = Math.max(0, at - around)
  const end = at + query.length
  return [
    (from > 0 ? '…' : '') + text.slice(from, at).replace(/\s+/g, ' '), el('mark', {}, text.slice(at, end)),
    text.slice(end, end + 2 * around).replace(/\s+/g, ' '),
  ]
}

// Where a conversation has the words that are looked for.
function find(conversation, query) {
  const name = excerpt(title(conversation), query, 60)
  if (name) return { name, snippet: null }
  for (const { content } of Object.values(conversation.nodes)) {
    const snippet = excerpt(content, query)
    if (snippet) return { name: [title(conversation)], snippet }
  }
  return null
}

// Shows the conversations that have `query`, all of them if it is empty.
export function showHistory(conversations, current, query, act) {
  const wanted = query.trim().toLowerCase()
  const rows = []
  let group = ''
  for (const one of conversations) {
    const found = wanted ? find(one, wanted) : { name: [title(one)], snippet: null }
    if (!found) continue
    if (!wanted && age(one.updated) !== group) rows.push(el('h2', {}, (group = age(one.updated))))
    const name = title(one)
    rows.push(el(
      'div', { className: one === current ? 'entry current' : 'entry' },
      el('button', { type: 'button', className: 'open', onclick: () => act.open(one), 'aria-current': one === current ? 'true' : undefined },
        el('span', {}, ...found.name), found.snippet && el('span', { className: 'snippet' }, ...found.snippet)),
      el('span', { className: 'entry-tools' },
        iconButton('edit', `Rename ${name}`, () => act.rename(one)), iconButton('export', `Export ${name}`, () => act.export(one)),
        iconButton('trash', `Delete ${name}`, () => act.remove(one))),
    ))
  }
  if (!rows.length) rows.push(el('p', {}, wanted ? 'Nothing found.' : 'Conversations stay in this browser.'))
  $('history').replaceChildren(...rows)
}
