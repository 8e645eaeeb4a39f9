// What stays in this browser: conversations in IndexedDB, switches in localStorage.
import { newId, ROOT } from './tree.js'

const NAME = 'paceline'
const TABLE = 'conversations'
export const FORMAT = 'paceline-conversations'

let database
// Where the browser keeps nothing (a private window, say), conversations live as long as the page.
const fallback = new Map()

function open() {
  database ??= new Promise((resolve) => {
    if (!globalThis.indexedDB) return resolve(null)
    const asked = indexedDB.open(NAME, 1)
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: 'id' })
    asked.onsuccess = () => resolve(asked.result)
    asked.onerror = () => resolve(null)
  })
  return database
}

async function run(mode, work) {
  const db = await open()
  if (!db) return undefined
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(TABLE, mode)
    const request = work(transaction.objectStore(TABLE))
    transaction.oncomplete = () => resolve(request.result)
    transaction.onerror = transaction.onabort = () => reject(transaction.error)
  })
}

export async function all() {
  const found = (await run('readonly', (table) => table.getAll())) ?? [...fallback.values()]
  return found.sort((a, b) => b.updated - a.updated)
}

export async function save(conversation) {
  if ((await run('readwrite', (table) => table.put(conversation))) === undefined) fallback.set(conversation.id, conversation)
}

export async function remove(id) {
  fallback.delete(id)
  await run('readwrite', (table) => table.delete(id))
}

export const isKept = async () => (await open()) !== null

// A file's text as conversations; those that are here already get ids of their own.
export function parse(text, known) {
  let file
  try {
    file = JSON.parse(text)
  } catch {
    throw new Error('The file is not JSON.')
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error('The file has no conversations of this page.')
  return file.conversations.map((one, i) => {
    if (!isWhole(one)) throw new Error(`Conversation ${i + 1} of the file is damaged.`)
    return known.has(one.id) ? { ...one, id: newId() } : one
  })
}

// Whether every message of an imported conversation is there and reached once.
function isWhole(one) {
  if (typeof one?.id !== 'string' || typeof one.nodes !== 'object' || typeof one.children !== 'object' || typeof one.chosen !== 'object') return false
  const seen = new Set()
  const waiting = [ROOT]
  while (waiting.length) {
    const at = waiting.pop()
    if (seen.has(at) || !Array.isArray(one.children[at])) return false
    seen.add(at)
    for (const child of one.children[at]) {
      const node = one.nodes[child]
      if (typeof node?.content !== 'string' || typeof node.role !== 'string' || node.id !== child || node.parent !== at) return false
      waiting.push(child)
    }
  }
  one.settings = typeof one.settings === 'object' && one.settings !== null ? one.settings : {}
  return Number.isFinite(one.updated) && Number.isFinite(one.created)
}

export const serialize = (conversations) => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1)

// A switch that is remembered.
export const remembered = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`paceline.${name}`)) ?? otherwise
    } catch {
      return otherwise
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`paceline.${name}`, JSON.stringify(value))
    } catch {
      // A private window may refuse; the switch then holds as long as the page.
    }
  },
}
