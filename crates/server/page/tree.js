// A conversation as a tree of messages: an edit or a new try is a sibling, and `chosen` says of
// each message which of its answers is shown.

export const ROOT = 'root'

export const newId = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('')

export function newConversation(settings) {
  const now = Date.now()
  return { id: newId(), title: '', created: now, updated: now, settings: structuredClone(settings), nodes: {}, children: { [ROOT]: [] }, chosen: {} }
}

// Adds a message after `parent`, and shows it.
export function add(conversation, parent, message) {
  const id = newId()
  conversation.nodes[id] = { id, parent, created: Date.now(), ...message }
  conversation.children[id] = []
  conversation.children[parent].push(id)
  conversation.chosen[parent] = id
  return conversation.nodes[id]
}

// The messages that are shown, the oldest first.
export function path(conversation) {
  const shown = []
  for (let at = ROOT; ; ) {
    const children = conversation.children[at] ?? []
    const next = children.includes(conversation.chosen[at]) ? conversation.chosen[at] : children.at(-1)
    if (next === undefined) return shown
    shown.push(conversation.nodes[next])
    at = next
  }
}

// The messages up to `node`, which is left out.
export function before(conversation, node) {
  const found = []
  for (let at = node.parent; at !== ROOT; at = conversation.nodes[at].parent) found.unshift(conversation.nodes[at])
  return found
}

export const siblings = (conversation, node) => conversation.children[node.parent]

// Shows the sibling that many places further.
export function turn(conversation, node, by) {
  const all = siblings(conversation, node)
  const next = all[all.indexOf(node.id) + by]
  if (next === undefined) return false
  conversation.chosen[node.parent] = next
  return true
}

// Takes a message out, with all that follows it.
export function remove(conversation, node) {
  for (const child of [...conversation.children[node.id]]) remove(conversation, conversation.nodes[child])
  const all = siblings(conversation, node)
  all.splice(all.indexOf(node.id), 1)
  delete conversation.nodes[node.id]
  delete conversation.children[node.id]
  if (conversation.chosen[node.parent] === node.id) conversation.chosen[node.parent] = all.at(-1)
}

// What a conversation is called until it is renamed.
export function title(conversation) {
  if (conversation.title) return conversation.title
  const first = path(conversation).find((node) => node.role === 'user')
  const text = first?.content.trim().replace(/\s+/g, ' ') || first?.files?.[0]?.name
  return text ? (text.length > 60 ? `${text.slice(0, 58)}…` : text) : 'New conversation'
}
