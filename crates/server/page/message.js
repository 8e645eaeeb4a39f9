// One message on the page. A view is made once and refreshed while its message grows.
import { chip } from './files.js'
import { copy, el, icon, iconButton } from './dom.js'
import { block, copyCode, split } from './markdown.js'
import { milliseconds, report, spans, summary, tint, verdict, worth } from './speculation.js'
import { siblings } from './tree.js'

// Markdown that grows: blocks whose source has not changed stay as they are.
class Prose {
  constructor() {
    this.root = el('div', { className: 'prose' })
    this.keys = []
  }

  refresh(text, rounds, channel) {
    const blocks = split(text)
    const tokens = rounds && spans(rounds, text, channel)
    const keys = blocks.map(({ source }) => `${tokens ? 'tinted' : 'plain'} ${source}`)
    blocks.forEach(({ source, offset }, i) => {
      if (this.keys[i] === keys[i]) return
      const made = block(source)
      if (tokens) tint(made, source, offset, tokens)
      const old = this.root.children[i]
      if (old) old.replaceWith(made)
      else this.root.append(made)
    })
    while (this.root.children.length > blocks.length) this.root.lastChild.remove()
    this.keys = keys
  }
}

// A text of a model: its reasoning, folded, and its answer.
class Written {
  constructor() {
    this.prose = new Prose()
    this.element = el('div', {}, this.prose.root)
  }

  refresh({ content, reasoning, seconds }, isWriting, rounds) {
    if (reasoning && !this.thinking) {
      this.thoughts = new Prose()
      this.label = el('summary')
      this.thinking = el('details', { className: 'thinking' }, this.label, this.thoughts.root)
      this.thinking.addEventListener('toggle', () => this.refresh(...this.last))
      this.element.prepend(this.thinking)
    }
    this.last = [{ content, reasoning, seconds }, isWriting, rounds]
    if (reasoning) {
      this.label.textContent = isWriting && !content ? 'Thinking…' : `Thought${seconds ? ` for ${seconds} s` : ''}`
      if (this.thinking.open) this.thoughts.refresh(reasoning, rounds, 'reasoning')
    }
    this.prose.refresh(content, rounds, undefined)
  }
}

// The server's words, with the names in them set as code.
const quoted = (text) => text.split('`').map((part, i) => (i % 2 ? el('code', {}, part) : part))

// The message `node` of `conversation`; `act` has what its buttons do.
export class MessageView {
  constructor(conversation, node, act) {
    Object.assign(this, { conversation, node, act })
    this.element = el('article', { className: `message ${node.role}`, 'data-id': node.id, 'aria-label': { user: 'You', tool: 'Tool', assistant: 'Model' }[node.role] })
    this.element.addEventListener('click', ({ target }) => target.dataset.copy !== undefined && copyCode(target))
    if (node.role === 'assistant') this.assistant()
    else this.fixed()
  }

  fixed() {
    const { content, files = [], role, name } = this.node
    const shown = files.map((file) => (file.kind === 'picture' ? el('img', { src: file.data, alt: file.name }) : chip(file)))
    const text = role === 'tool' ? `${name}: ${content}` : content
    this.element.append(...[files.length > 0 && el('div', { className: 'files' }, ...shown), text && el('div', { className: 'bubble' }, text)].filter(Boolean))
    if (role === 'user') this.element.append(this.tools = el('div', { className: 'tools' }))
    this.refresh()
  }

  assistant() {
    this.body = el('div')
    this.written = new Written()
    this.calls = el('div')
    this.state = el('div')
    this.tools = el('div', { className: 'tools' })
    this.more = el('div')
    this.element.append(this.body, this.calls, this.state, this.tools, this.more)
    this.refresh()
  }

  refresh() {
    const { node, act } = this
    if (node.role === 'assistant') {
      const rounds = act.isTinted() && node.rounds?.length ? node.rounds : null
      this.written.refresh(node, act.isWriting(node), rounds)
      this.twins()
      this.showCalls()
      this.showState()
      const of = worth(node)
      const isOpen = act.isTinted() && !act.isWriting(node)
      this.more.replaceChildren(...[isOpen && of && report(node)].filter(Boolean))
    }
    if (this.tools) this.tools.replaceChildren(...this.buttons().filter(Boolean))
  }

  // An answer alone, or beside the one that was written without speculation.
  twins() {
    const { twin } = this.node
    if (!twin) {
      if (this.body.firstChild !== this.written.element) this.body.replaceChildren(this.written.element)
      return
    }
    if (!this.twin) {
      this.twin = new Written()
      this.paces = [el('div', { className: 'pace on' }, el('i')), el('div', { className: 'pace' }, el('i'))]
      this.times = [el('span'), el('span')]
      const side = (name, i, written) => el('section', { 'aria-label': name }, el('h2', {}, name, this.times[i]), this.paces[i], written.element)
      this.verdict = el('div', { className: 'outcome' })
      this.pair = el('div', { className: 'twins' }, side('Speculation on', 0, this.written), side('Speculation off', 1, this.twin), this.verdict)
    }
    if (this.body.firstChild !== this.pair) this.body.replaceChildren(this.pair)
    this.twin.refresh(twin, !twin.record && !twin.error, null)
    const length = Math.max(1, this.node.content.length + (this.node.reasoning ?? '').length)
    const sides = [this.node, twin]
    sides.forEach((side, i) => {
      const written = side.content.length + (side.reasoning ?? '').length
      const { timings } = side.record ?? {}
      this.paces[i].firstChild.style.transform = `scaleX(${side.record ? 1 : Math.min(1, written / length)})`
      this.times[i].textContent = timings ? `${milliseconds(timings.predicted_ms)} · ${Math.round(timings.predicted_per_second).toLocaleString('en')} tokens a second` : side.error ? 'stopped' : 'writing…'
    })
    const said = twin.error ? el('p', { className: 'verdict unequal' }, el('b', {}, twin.error.title), `: ${twin.error.message}`) : verdict(this.node)
    this.verdict.replaceChildren(...[said].filter(Boolean))
  }

  showCalls() {
    const { node, act } = this
    const calls = node.calls ?? []
    const isOpen = !act.isWriting(node) && calls.length > 0 && act.isLast(node)
    // Made anew only where something is new: a result may be half typed.
    const key = JSON.stringify([isOpen, calls])
    if (this.callsKey === key) return
    this.callsKey = key
    const inputs = []
    const boxes = calls.map(({ function: { name, arguments: given } }) => {
      let shown = given
      try {
        shown = JSON.stringify(JSON.parse(given), null, 2)
      } catch {
        // Still being written.
      }
      const input = isOpen && el('textarea', { rows: 2, placeholder: 'The result', 'aria-label': `Result of ${name}` })
      if (input) inputs.push(input)
      return el('section', { className: 'call', 'aria-label': `Call of ${name}` }, el('h2', {}, 'Calls ', el('code', {}, name)), el('pre', {}, shown), input)
    })
    const send = isOpen && el('button', { type: 'button', className: 'primary', onclick: () => act.results(node, inputs.map((input) => input.value)) }, calls.length > 1 ? 'Send the results' : 'Send the result')
    this.calls.replaceChildren(...boxes, ...(send ? [send] : []))
  }

  showState() {
    const { node, act } = this
    const parts = []
    if (act.isWriting(node) && !node.content && !node.reasoning && !node.calls?.length) {
      parts.push(el('p', { className: 'waiting' }, el('i'), act.progress(node)))
    }
    if (node.error) {
      parts.push(el(
        'div', { className: 'error', role: 'alert' }, el('strong', {}, node.error.title), ...quoted(node.error.message),
        el('div', {}, el('button', { type: 'button', onclick: () => act.retry(node) }, 'Try again')),
      ))
    } else if (node.record?.finish === 'length') {
      parts.push(el('p', { className: 'waiting' }, 'Ended at the limit of tokens.'))
    } else if (node.isStopped) {
      parts.push(el('p', { className: 'waiting' }, 'Stopped.'))
    }
    this.state.replaceChildren(...parts)
  }

  buttons() {
    const { node, act, conversation } = this
    if (act.isWriting(node)) return []
    const all = siblings(conversation, node)
    const at = all.indexOf(node.id)
    const branches = all.length > 1 && el(
      'span', { className: 'branches', role: 'group', 'aria-label': 'Versions' },
      iconButton('left', 'Earlier version', () => act.turn(node, -1), { disabled: at === 0 }),
      el('span', {}, `${at + 1}/${all.length}`),
      iconButton('right', 'Later version', () => act.turn(node, 1), { disabled: at === all.length - 1 }),
    )
    const copier = iconButton('copy', 'Copy', () => copier.querySelector('.done') || copy(node.content, copier, el('span', { className: 'done' }, icon('check'))))
    if (node.role === 'user') return [act.quiet(copier), act.quiet(iconButton('edit', 'Edit', () => this.edit())), branches]
    if (!node.content && !node.reasoning && !node.record) return [branches]
    const of = worth(node)
    const isLast = act.isLast(node)
    const line = of && el('button', { type: 'button', className: 'summary', 'aria-pressed': String(act.isTinted()), title: 'Show which tokens were guessed', onclick: act.toggleTint }, summary(of))
    const twin = of?.engaged && !node.calls?.length && iconButton('twin', node.twin ? 'Close the comparison' : 'Compare with speculation off', () => act.twin(node))
    return [line, ...[copier, iconButton('again', 'Write another answer', () => act.again(node)), twin].map((b) => b && (isLast ? b : act.quiet(b))), branches]
  }

  // Turns a message of the user into a field to edit it in; what is sent is another version.
  edit() {
    const field = el('textarea', { value: this.node.content, 'aria-label': 'Edit the message' })
    // Files can be left out, such as a picture that the server refuses.
    let kept = this.node.files ?? []
    const chips = el('div', { className: 'attachments' }, ...kept.map((file) => {
      const shown = chip(file, () => {
        kept = kept.filter((other) => other !== file)
        shown.remove()
        field.focus()
      })
      return shown
    }))
    const close = () => {
      editor.remove()
      for (const child of this.element.children) child.hidden = false
      this.tools.querySelector('[aria-label="Edit"]')?.focus()
    }
    const save = () => {
      close()
      this.act.edited(this.node, field.value, kept)
    }
    const editor = el(
      'div', { className: 'editor' }, kept.length > 0 && chips, field,
      el('div', { className: 'dialog-buttons' }, el('button', { type: 'button', onclick: close }, 'Cancel'), el('button', { type: 'button', className: 'primary', onclick: save }, 'Send')),
    )
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation()
        close()
      }
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault()
        save()
      }
    })
    for (const child of this.element.children) child.hidden = true
    this.element.append(editor)
    field.focus()
  }
}
