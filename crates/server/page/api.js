// The server: its models, its answers as streams, and what is said of errors.
import { ask } from './dom.js'
import { remembered } from './store.js'

// The page may lie under `/` or `/v1/`.
const ROOT = new URL('..', import.meta.url).pathname
const V1 = ROOT.endsWith('/v1/') ? ROOT : `${ROOT}v1/`

// What a person can be told of, with what to do about it.
export class Trouble extends Error {
  constructor(title, message, kind) {
    super(message)
    this.title = title
    this.kind = kind
  }
}

function headers() {
  const key = remembered.get('key', '')
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) }
}

async function send(path, options = {}) {
  let response
  try {
    response = await fetch(path, { ...options, headers: headers() })
  } catch (error) {
    if (error.name === 'AbortError') throw error
    throw new Trouble('The server cannot be reached', 'Is it still running? Nothing that was written is lost.', 'lost')
  }
  if (response.ok) return response
  const body = await response.json().catch(() => ({}))
  const message = body.error?.message ?? `The server answered ${response.status}.`
  if (response.status === 401) throw new Trouble('This server wants an API key', message, 'key')
  const titles = { 400: 'The server refused the request', 403: 'The server refuses this page', 413: 'The message is too large', 429: 'The server is busy', 503: 'The server is busy' }
  throw new Trouble(titles[response.status] ?? 'The server failed', message, 'refused')
}

// Does `work`, and again after asking for an API key where one is wanted.
export async function withKey(work) {
  for (;;) {
    try {
      return await work()
    } catch (error) {
      if (error.kind !== 'key') throw error
      const hadOne = remembered.get('key', '') !== ''
      const text = hadOne ? 'The key of this browser is not one of the server’s.' : 'The key stays in this browser.'
      const key = await ask({ title: error.title, text, label: 'API key', type: 'password', ok: 'Use this key' })
      if (key === null) throw error
      remembered.set('key', key.trim())
    }
  }
}

export const models = async () => (await (await send(`${V1}models`)).json()).data

export async function isUp() {
  try {
    return (await fetch(`${ROOT}health`)).ok
  } catch {
    return false
  }
}

// The lines of a stream of events.
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    const parts = (rest + value).split('\n')
    rest = parts.pop()
    yield* parts
  }
}

// Streams an answer. `on` has a function for each thing that may come: `text`, `reasoning`,
// `call`, `rounds`, `progress`; the last chunk's record is returned.
export async function stream(body, on, signal) {
  const response = await send(`${V1}chat/completions`, { method: 'POST', body: JSON.stringify(body), signal })
  let last = null
  let isWhole = false
  try {
    for await (const line of lines(response.body)) {
      if (line.startsWith(': ')) on.progress?.(line.slice(2))
      if (!line.startsWith('data: ')) continue
      const data = line.slice(6)
      if (data === '[DONE]') {
        isWhole = true
        break
      }
      const chunk = JSON.parse(data)
      if (chunk.error) throw new Trouble('The server stopped writing', chunk.error.message, 'refused')
      const choice = chunk.choices[0]
      if (choice?.trace) on.rounds?.(choice.trace)
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {}
      if (reasoning) on.reasoning?.(reasoning)
      if (content) on.text?.(content)
      for (const call of calls ?? []) on.call?.(call)
      if (choice?.finish_reason) last = { finish: choice.finish_reason, seed: chunk.seed, speculation: chunk.speculation, timings: chunk.timings }
    }
  } catch (error) {
    if (error.name === 'AbortError' || error instanceof Trouble) throw error
    throw new Trouble('The connection was lost', 'What was written so far is kept.', 'lost')
  }
  if (!isWhole) throw new Trouble('The connection was lost', 'What was written so far is kept.', 'lost')
  return last
}
