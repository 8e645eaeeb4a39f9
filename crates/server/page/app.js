// The page: what is open, what is being written, and what keys and buttons do.
import * as api from './api.js'
import { $, ask, download, el, icon, plural, setIcon } from './dom.js'
import * as composer from './composer.js'
import * as files from './files.js'
import { showHistory } from './history.js'
import { MessageView } from './message.js'
import * as settings from './settings.js'
import * as store from './store.js'
import * as tree from './tree.js'

const SUGGESTIONS = ['Tell me a story about a fox.', 'Tell me a story about a rabbit and a kite.', 'Tell me a story about a boat.']
// How often an answer that grows is saved, in milliseconds.
const SAVE_EVERY = 1500
const NARROW = matchMedia('(max-width: 860px)')
const { remembered } = store

let conversations = []
let current
let models = []
// Views of the messages that are shown, by id.
let views = new Map()
// What is being written, by id of the message: how to stop it, and how far the server is.
const running = new Map()
let isTinted = remembered.get('tint', false)

const model = () => models.find((one) => one.id === $('model').value) ?? models[0]
const isNarrow = () => NARROW.matches
const isRunning = (conversation) => [...running.values()].some((one) => one.conversation === conversation)

// --- Saving

const saving = new Map()

function save(conversation, isSoon = true) {
  if (!isSoon) {
    clearTimeout(saving.get(conversation.id))
    saving.delete(conversation.id)
    return store.save(conversation).catch((error) => banner(`The browser could not save the conversation: ${error.message}`))
  }
  if (!saving.has(conversation.id)) saving.set(conversation.id, setTimeout(() => save(conversation, false), SAVE_EVERY))
}

function touch(conversation) {
  conversation.updated = Date.now()
  if (!conversations.includes(conversation)) conversations.push(conversation)
  conversations.sort((a, b) => b.updated - a.updated)
  history()
  return save(conversation, false)
}

// --- Showing

function banner(text) {
  $('banner').hidden = !text
  $('banner').textContent = text ?? ''
}

const status = (text) => {
  $('status').textContent = text
}

function history() {
  showHistory(conversations, current, $('search').value, { open, rename, remove: removeConversation, export: (one) => exported([one]) })
}

function isAtEnd() {
  const box = $('scroller')
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80
}

function toEnd(isSmooth) {
  $('scroller').scrollTo({ top: $('scroller').scrollHeight, behavior: isSmooth ? 'smooth' : 'instant' })
}

// Shows the open conversation anew; views of messages that stay are kept.
function render() {
  const shown = tree.path(current)
  const kept = views
  views = new Map()
  for (const node of shown) views.set(node.id, kept.get(node.id) ?? new MessageView(current, node, act))
  $('messages').replaceChildren(...[...views.values()].map((view) => view.element))
  for (const view of views.values()) view.refresh()
  $('empty').hidden = shown.length > 0
  $('title').textContent = tree.title(current)
  document.title = shown.length ? `${tree.title(current)} · paceline` : 'paceline'
  widen()
  showSend()
}

function widen() {
  $('messages').classList.toggle('compared', tree.path(current).some((node) => node.twin))
}

const waiting = new Set()

// Refreshes a message with the next frame.
function refresh(node) {
  if (!waiting.size) {
    requestAnimationFrame(() => {
      const isFollowing = isAtEnd()
      for (const id of waiting) views.get(id)?.refresh()
      waiting.clear()
      if (isFollowing) toEnd(false)
    })
  }
  waiting.add(node.id)
}

function showSend() {
  const isBusy = isRunning(current)
  setIcon($('send'), isBusy ? 'stop' : 'up')
  $('send').setAttribute('aria-label', isBusy ? 'Stop' : 'Send')
  $('send').title = isBusy ? 'Stop (Esc)' : 'Send (Enter)'
}

function open(conversation) {
  current = conversation
  views = new Map()
  remembered.set('open', conversation.id)
  render()
  history()
  settings.show(current.settings, model(), settingsChanged)
  if (isNarrow()) sidebar(false)
  toEnd(false)
  showContext()
}

function showContext() {
  const last = tree.path(current).findLast((node) => node.record?.timings)
  const most = model()?.meta?.n_ctx
  if (!last || !most) return status('')
  const { cache_n: cached, prompt_n: read, predicted_n: written } = last.record.timings
  status(`${(cached + read + written).toLocaleString('en')} of ${most.toLocaleString('en')} tokens of context`)
}

function fresh() {
  open(tree.newConversation(remembered.get('settings', {})))
  $('composer').focus()
}

function settingsChanged() {
  remembered.set('settings', current.settings)
  if (conversations.includes(current)) save(current)
}

// --- Writing

function body(conversation, node) {
  const messages = tree.before(conversation, node).map(({ role, content, files: own, calls, callId, name }) => {
    if (role === 'user') return { role, content: files.content(content, own) }
    if (role === 'tool') return { role, content, tool_call_id: callId, name }
    return { role, content, ...(calls?.length && { tool_calls: calls }) }
  })
  // As it was when the answer was asked for, so that a twin gets the same.
  if (node.system) messages.unshift({ role: 'system', content: node.system })
  return { messages, stream: true, ...node.sent }
}

// Streams into `target`, which is a message or its twin.
async function write(conversation, node, target, request, signal) {
  const started = performance.now()
  const grow = (name) => (text) => {
    if (name === 'content' && target.reasoning && target.seconds === undefined) target.seconds = Math.round((performance.now() - started) / 1000)
    target[name] = (target[name] ?? '') + text
    refresh(node)
    save(conversation)
  }
  const on = {
    text: grow('content'),
    reasoning: grow('reasoning'),
    rounds: (rounds) => target.rounds?.push(...rounds),
    call: ({ index, id, function: part }) => {
      target.calls ??= []
      const call = (target.calls[index] ??= { id, type: 'function', function: { name: '', arguments: '' } })
      call.function.name += part?.name ?? ''
      call.function.arguments += part?.arguments ?? ''
      refresh(node)
    },
    progress: (text) => {
      const at = running.get(node.id)
      const prefill = /^prefill (\d+)\/(\d+)/.exec(text)
      if (at) at.progress = prefill ? `Reading the prompt: ${Math.round((100 * prefill[1]) / prefill[2])} %` : text === 'queued' ? 'Waiting for a turn' : ''
      refresh(node)
    },
  }
  try {
    target.record = await api.withKey(() => api.stream(request, on, signal))
  } catch (error) {
    if (error.name === 'AbortError') target.isStopped = true
    else {
      target.error = { title: error.title ?? 'Something went wrong', message: error.message }
      if (error.kind === 'lost') lost()
    }
  }
}

// Writes the twin of an answer: the same request with speculation off.
function writeTwin(conversation, node, signal, isBeside) {
  node.twin = { content: '', isBeside }
  widen()
  return write(conversation, node, node.twin, { ...body(conversation, node), speculation: 'off' }, signal)
}

// Writes an answer after `parent`.
async function generate(conversation, parent) {
  const own = conversation.settings
  const sent = { ...settings.fields(own), model: model()?.id, seed: own.seed ?? Math.floor(Math.random() * 2 ** 32) }
  sent.speculation = { trace: true, ...(own.draft_max !== undefined && { draft_max: own.draft_max }) }
  const node = tree.add(conversation, parent, { role: 'assistant', content: '', rounds: [], sent, ...(own.system && { system: own.system }) })
  const isOff = own.draft_max === 0
  $('announce').textContent = ''
  await during(conversation, node, async (signal) => {
    if (current === conversation) render()
    toEnd(false)
    const jobs = [write(conversation, node, node, body(conversation, node), signal)]
    if (own.twin === 'beside' && !isOff) jobs.push(writeTwin(conversation, node, signal, true))
    await Promise.all(jobs)
    if (own.twin === 'after' && node.record?.speculation?.engaged && !node.calls) await writeTwin(conversation, node, signal, false)
    // Texts are compared, and only those that have ended.
    if (node.twin && (node.calls || !node.record || !(node.twin.record || node.twin.error))) delete node.twin
  })
  // A model that was loaded for this says more of itself now.
  if (!model()?.meta) loadModels()
  if (current === conversation) {
    showContext()
    $('announce').textContent = node.error ? '' : node.isStopped ? 'Stopped' : 'The answer is finished'
  }
}

// Does `work` as the writing of `node`: it can be stopped, and is saved at its end.
async function during(conversation, node, work) {
  const controller = new AbortController()
  running.set(node.id, { conversation, controller, progress: '' })
  showSend()
  touch(conversation)
  await work(controller.signal)
  running.delete(node.id)
  if (current === conversation) {
    const isFollowing = isAtEnd()
    render()
    if (isFollowing) toEnd(false)
  }
  touch(conversation)
}

function stop() {
  for (const { conversation, controller } of running.values()) if (conversation === current) controller.abort()
}

function submit() {
  if (isRunning(current)) return stop()
  const message = composer.take()
  if (!message) return
  const parent = tree.path(current).at(-1)?.id ?? tree.ROOT
  generate(current, tree.add(current, parent, { role: 'user', ...message }).id)
}

// What the buttons of a message do.
const act = {
  isTinted: () => isTinted,
  isWriting: (node) => running.has(node.id),
  isLast: (node) => tree.path(current).at(-1) === node,
  progress: (node) => running.get(node.id)?.progress || 'Starting',
  quiet(button) {
    button.classList.add('act')
    return button
  },
  toggleTint,
  turn(node, by) {
    if (isRunning(current) || !tree.turn(current, node, by)) return
    render()
    save(current)
    const shown = tree.path(current).find((other) => other.parent === node.parent)
    const buttons = views.get(shown.id)?.element.querySelectorAll('.branches button') ?? []
    ;[...buttons].find((button) => button.title.startsWith(by < 0 ? 'Earlier' : 'Later') && !button.disabled)?.focus()
  },
  again(node) {
    if (!isRunning(current)) generate(current, node.parent)
  },
  retry(node) {
    if (isRunning(current)) return
    if (!node.content && !node.reasoning) tree.remove(current, node)
    generate(current, node.parent)
  },
  edited(node, text, kept) {
    if (isRunning(current) || (!text.trim() && !kept.length)) return
    const made = tree.add(current, node.parent, { role: 'user', content: text, ...(kept.length && { files: kept }) })
    generate(current, made.id)
  },
  results(node, texts) {
    let parent = node.id
    node.calls.forEach((call, i) => {
      parent = tree.add(current, parent, { role: 'tool', content: texts[i], callId: call.id, name: call.function.name }).id
    })
    generate(current, parent)
  },
  async twin(node) {
    if (isRunning(current)) return
    if (node.twin) {
      delete node.twin
      render()
      return save(current)
    }
    const conversation = current
    await during(conversation, node, async (signal) => {
      await writeTwin(conversation, node, signal, false)
      if (!node.twin.record && !node.twin.error) delete node.twin
    })
  },
}

// --- Conversations

async function rename(conversation) {
  const name = await ask({ title: 'Rename the conversation', label: 'Name', value: tree.title(conversation), ok: 'Rename' })
  if (name === null) return
  conversation.title = name.trim()
  if (current === conversation) render()
  touch(conversation)
}

async function removeConversation(conversation) {
  if (!(await ask({ title: 'Delete the conversation?', text: `“${tree.title(conversation)}” is deleted from this browser.`, ok: 'Delete' }))) return
  for (const one of running.values()) if (one.conversation === conversation) one.controller.abort()
  clearTimeout(saving.get(conversation.id))
  conversations = conversations.filter((one) => one !== conversation)
  await store.remove(conversation.id)
  if (current === conversation) fresh()
  history()
}

function exported(list) {
  const name = list.length === 1 ? tree.title(list[0]).replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 40) : 'conversations'
  download(`${name}.json`, store.serialize(list))
}

async function imported(file) {
  try {
    const found = store.parse(await file.text(), new Set(conversations.map((one) => one.id)))
    for (const one of found) {
      conversations.push(one)
      await store.save(one)
    }
    conversations.sort((a, b) => b.updated - a.updated)
    banner(null)
    status(`${plural(found.length, 'conversation')} imported`)
    if (found.length) open(found[0])
  } catch (error) {
    banner(`${file.name} was not imported. ${error.message}`)
  }
}

// --- Server

let isWaiting = false

// Says that the server is gone, and looks for it until it is back.
async function lost() {
  if (isWaiting) return
  isWaiting = true
  banner('The server does not answer. Conversations are safe; this page looks for it every two seconds.')
  do await new Promise((resolve) => setTimeout(resolve, 2000))
  while (!(await api.isUp()))
  isWaiting = false
  banner(null)
  loadModels()
}

async function loadModels() {
  try {
    models = await api.withKey(api.models)
  } catch (error) {
    if (error.kind === 'lost') return lost()
    return banner(`${error.title}: ${error.message}`)
  }
  const wanted = remembered.get('model', models[0]?.id)
  $('model').replaceChildren(...models.map(({ id }) => el('option', { value: id, selected: id === wanted }, id)))
  showModel()
}

function showModel() {
  const { id, meta } = model() ?? {}
  $('empty-model').textContent = id ?? 'the model'
  const drafter = meta?.speculation?.drafter
  $('drafter').hidden = !meta
  $('drafter').textContent = drafter ? `drafts: ${drafter}` : 'no drafter'
  $('drafter').title = meta?.speculation?.reason ?? ''
  settings.show(current.settings, model(), settingsChanged)
  showContext()
}

// --- Switches

function toggleTint() {
  isTinted = !isTinted
  remembered.set('tint', isTinted)
  $('tint').setAttribute('aria-pressed', isTinted)
  const isFollowing = isAtEnd()
  for (const view of views.values()) view.refresh()
  if (isFollowing) toEnd(false)
}

function sidebar(isOpen) {
  $('sidebar').classList.toggle('closed', !isOpen)
  $('open-sidebar').setAttribute('aria-expanded', isOpen)
  if (!isNarrow()) remembered.set('sidebar', isOpen)
  if (isNarrow() && isOpen) $('close-sidebar').focus()
}

function panel(isOpen) {
  $('settings').hidden = !isOpen
  $('open-settings').setAttribute('aria-expanded', isOpen)
  if (isOpen) $('close-settings').focus()
  else $('open-settings').focus()
}

function showTheme() {
  const theme = remembered.get('theme', null)
  if (theme) document.documentElement.dataset.theme = theme
  else delete document.documentElement.dataset.theme
  const label = `Theme: ${theme ?? 'as the system'}`
  $('theme').setAttribute('aria-label', label)
  $('theme').title = label
}

function turnTheme() {
  const order = [null, 'light', 'dark']
  remembered.set('theme', order[(order.indexOf(remembered.get('theme', null)) + 1) % 3])
  showTheme()
}

const last = (role) => tree.path(current).findLast((node) => node.role === role)
const press = (node, label) => views.get(node?.id)?.element.querySelector(`button[aria-label="${label}"]`)?.click()

// Keys: how they are shown, what they do, the code of the key with Alt or what `key` says.
const SHORTCUTS = [
  ['Enter', 'send the message; Shift+Enter begins a line'],
  ['Esc', 'stop writing, or close what is open'],
  ['Ctrl+K', 'search conversations'],
  ['Alt+N', 'new conversation', 'KeyN', fresh],
  ['Alt+S', 'show which tokens were guessed', 'KeyS', toggleTint],
  ['Alt+T', 'compare the last answer with its twin', 'KeyT', () => press(last('assistant'), last('assistant')?.twin ? 'Close the comparison' : 'Compare with speculation off')],
  ['Alt+R', 'write another answer', 'KeyR', () => last('assistant') && act.again(last('assistant'))],
  ['Alt+E', 'edit your last message', 'KeyE', () => press(last('user'), 'Edit')],
  ['Alt+J, Alt+L', 'earlier and later version of the last answer', 'KeyJ', () => last('assistant') && act.turn(last('assistant'), -1)],
  [null, null, 'KeyL', () => last('assistant') && act.turn(last('assistant'), 1)],
  ['Alt+B', 'show or hide conversations', 'KeyB', () => sidebar($('sidebar').classList.contains('closed'))],
  ['Alt+P', 'show or hide settings', 'KeyP', () => panel($('settings').hidden)],
  ['/', 'go to the message box'],
  ['?', 'this list'],
]

function keys(event) {
  const { key, code, altKey, ctrlKey, metaKey, target } = event
  if (document.querySelector('dialog[open]')) return
  const isTyping = target.closest?.('input, textarea, select')
  const found = altKey && !ctrlKey && !metaKey && SHORTCUTS.find(([, , own]) => own === code)
  if (found) found[3]()
  else if (key === 'k' && (ctrlKey || metaKey)) {
    sidebar(true)
    $('search').focus()
  } else if (key === 'Escape') escape(target)
  else if (key === '/' && !isTyping) $('composer').focus()
  else if (key === '?' && !isTyping) $('help-dialog').showModal()
  else return
  event.preventDefault()
}

function escape(target) {
  if (isRunning(current)) stop()
  else if (target === $('search') && $('search').value) {
    $('search').value = ''
    history()
  } else if (!$('settings').hidden) panel(false)
  else if (isNarrow()) sidebar(false)
}

function listen() {
  $('composer-form').addEventListener('submit', (event) => {
    event.preventDefault()
    submit()
  })
  composer.listen({ submit: () => isRunning(current) || submit(), status, banner })
  $('import-file').addEventListener('change', () => {
    imported($('import-file').files[0])
    $('import-file').value = ''
  })
  $('import').addEventListener('click', () => $('import-file').click())
  $('export-all').addEventListener('click', () => exported(conversations))
  $('new-chat').addEventListener('click', fresh)
  $('search').addEventListener('input', history)
  $('open-sidebar').addEventListener('click', () => sidebar($('sidebar').classList.contains('closed')))
  $('close-sidebar').addEventListener('click', () => {
    sidebar(false)
    $('open-sidebar').focus()
  })
  $('open-settings').addEventListener('click', () => panel($('settings').hidden))
  $('close-settings').addEventListener('click', () => panel(false))
  $('tint').addEventListener('click', toggleTint)
  $('theme').addEventListener('click', turnTheme)
  $('help').addEventListener('click', () => $('help-dialog').showModal())
  $('model').addEventListener('change', () => {
    remembered.set('model', $('model').value)
    showModel()
  })
  $('to-end').addEventListener('click', () => toEnd(true))
  $('scroller').addEventListener('scroll', () => {
    $('to-end').hidden = isAtEnd()
  }, { passive: true })
  document.addEventListener('keydown', keys)
  document.addEventListener('visibilitychange', () => document.hidden || store.isKept().then((isKept) => isKept && synchronize()))
}

// What was being written when the page was closed has stopped.
function settle(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (node.role === 'assistant' && !node.record && !node.error) node.isStopped = true
    if (node.twin && !node.twin.record && !node.twin.error) delete node.twin
  }
}

// Takes over what another tab of this browser has changed, but for what is being written here.
async function synchronize() {
  const stored = await store.all()
  const own = new Map(conversations.map((one) => [one.id, one]))
  const isNewer = (one) => one.updated > (own.get(one.id)?.updated ?? -1)
  const taken = stored.filter((one) => isNewer(one) && !(own.has(one.id) && isRunning(own.get(one.id))))
  const kept = conversations.filter((one) => isRunning(one) || stored.some(({ id }) => id === one.id))
  if (!taken.length && kept.length === conversations.length) return
  taken.forEach((one) => own.set(one.id, one))
  conversations = [...new Set([...kept, ...taken].map(({ id }) => own.get(id)))].sort((a, b) => b.updated - a.updated)
  const again = conversations.find(({ id }) => id === current.id)
  if (again && again !== current) open(again)
  else history()
}

async function start() {
  for (const button of document.querySelectorAll('[data-icon]')) button.prepend(icon(button.dataset.icon))
  for (const [shown, what] of SHORTCUTS.filter(([name]) => name)) {
    $('shortcuts').append(el('dt', {}, ...shown.split(', ').flatMap((one, i) => [i ? ' ' : '', el('kbd', {}, one)])), el('dd', {}, what))
  }
  $('suggestions').append(...SUGGESTIONS.map((text) => el('button', { type: 'button', onclick: () => {
    $('composer').value = text
    submit()
  } }, text)))
  showTheme()
  $('tint').setAttribute('aria-pressed', isTinted)
  sidebar(!isNarrow() && remembered.get('sidebar', true))
  listen()
  conversations = await store.all()
  conversations.forEach(settle)
  const before = conversations.find((one) => one.id === remembered.get('open', ''))
  if (before) open(before)
  else fresh()
  if (!(await store.isKept())) banner('This browser keeps nothing for this page: conversations are gone when it is closed. Export what you want to keep.')
  loadModels()
}

start()
