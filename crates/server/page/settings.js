// The settings of a conversation: its system prompt, and every option of the sampler that the
// server reports. A field that is left empty is the server's to decide.
import { $, el } from './dom.js'

const MAIN = ['temperature', 'top_p', 'top_k', 'min_p']
const REASONING = {
  '': 'auto', none: 'off', minimal: 'minimal', low: 'low', medium: 'medium', high: 'high',
}
const FORMATS = { '': 'any text', json: 'a JSON object', schema: 'a JSON schema' }
const TWINS = { '': 'on request', after: 'after each answer', beside: 'beside each answer' }
const SPELLED = { top_p: 'Top-p', top_k: 'Top-k', min_p: 'Min-p', n: 'N', xtc_probability: 'XTC probability', xtc_threshold: 'XTC threshold', max_tokens: 'Most tokens' }

const spell = (name) => SPELLED[name] ?? (name[0].toUpperCase() + name.slice(1).replaceAll('_', ' ').replace(/^Dry/, 'DRY'))
// What the server says of an option, without its Markdown.
const plain = (about) => about.replaceAll('`', '').replaceAll('\\', '')

// What of `settings` goes into a request.
export function fields(settings) {
  const { system, reasoning, format, schema, tools, stop, draft_max: draftMax, twin, ...numbers } = settings
  const body = { ...numbers }
  if (stop?.length) body.stop = stop
  if (reasoning) body.reasoning_effort = reasoning
  if (format === 'json') body.response_format = { type: 'json_object' }
  if (format === 'schema' && schema) {
    body.response_format = { type: 'json_schema', json_schema: { name: 'answer', strict: true, schema: JSON.parse(schema) } }
  }
  if (tools) body.tools = JSON.parse(tools)
  return body
}

// Checks what was typed for a JSON field.
function jsonProblem(text, isRight, what) {
  try {
    return isRight(JSON.parse(text)) ? '' : what
  } catch (error) {
    return `Not JSON: ${error.message}`
  }
}
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value)

// Shows the settings in the panel; `changed` is called with each change.
export function show(settings, model, changed) {
  const options = model?.meta?.options ?? []
  let count = 0
  const set = (name, value) => {
    if (value === '' || value === undefined) delete settings[name]
    else settings[name] = value
    changed()
  }
  const field = (label, input, note, tall = false) => {
    input.id = `setting-${count++}`
    const small = note !== undefined && el('small', { id: `${input.id}-note` }, note)
    if (small) input.setAttribute('aria-describedby', small.id)
    return el('div', { className: tall ? 'field tall' : 'field' }, el('label', { htmlFor: input.id }, label), input, small)
  }
  const number = ({ name, type, low, high, default: usual, about }) => {
    const input = el('input', {
      type: 'number', name, min: low, max: high ?? undefined, step: type === 'integer' ? 1 : 'any',
      inputMode: type === 'integer' ? 'numeric' : 'decimal', value: settings[name] ?? '', placeholder: usual ?? 'auto',
    })
    input.addEventListener('input', () => {
      const isGood = input.validity.valid && (type !== 'integer' || Number.isInteger(Number(input.value)))
      input.classList.toggle('bad', !isGood)
      if (isGood) set(name, input.value === '' ? '' : Number(input.value))
    })
    return field(spell(name), input, about && plain(about))
  }
  const choice = (label, name, values, note) => {
    const input = el('select', { name }, ...Object.entries(values).map(([value, text]) => el('option', { value, selected: (settings[name] ?? '') === value }, text)))
    input.addEventListener('change', () => {
      set(name, input.value)
      if (name === 'format') schema.hidden = input.value !== 'schema'
    })
    return field(label, input, note)
  }
  const area = (label, name, rows, placeholder, check, note) => {
    const input = el('textarea', { name, rows, placeholder, value: settings[name] ?? '', className: check ? 'mono' : '', spellcheck: !check })
    const made = field(label, input, note ?? '', true)
    const problem = made.querySelector('small')
    input.addEventListener('input', () => {
      const wrong = check && input.value.trim() ? check(input.value) : ''
      input.classList.toggle('bad', Boolean(wrong))
      problem.classList.toggle('bad', Boolean(wrong))
      problem.textContent = wrong || note || ''
      if (!wrong) set(name, input.value.trim() ? input.value : '')
    })
    return made
  }
  const group = (title, ...children) => el('fieldset', {}, el('legend', {}, title), ...children)
  const stop = el('textarea', { name: 'stop', rows: 2, value: (settings.stop ?? []).join('\n') })
  stop.addEventListener('input', () => {
    const lines = stop.value.split('\n').filter((line) => line !== '')
    set('stop', lines.length ? lines : '')
  })
  const schema = area('JSON schema', 'schema', 6, '{"type": "object", …}', (text) => jsonProblem(text, isObject, 'A schema is an object.'))
  schema.hidden = settings.format !== 'schema'
  const draft = model?.meta?.speculation ?? {}
  const drafts = { '': 'auto', ...Object.fromEntries(Array.from({ length: (draft.draft_max ?? 0) + 1 }, (_, i) => [i, i === 0 ? 'off' : `${i} at most`])) }
  const draftChoice = el('select', { name: 'draft_max' }, ...Object.entries(drafts).map(([value, text]) => el('option', { value, selected: String(settings.draft_max ?? '') === value }, text)))
  draftChoice.addEventListener('change', () => set('draft_max', draftChoice.value === '' ? '' : Number(draftChoice.value)))
  const named = (name) => options.find((option) => option.name === name)
  const main = MAIN.map(named).filter(Boolean)
  const others = options.filter((option) => !MAIN.includes(option.name) && !['max_tokens', 'seed'].includes(option.name))
  const limits = [named('max_tokens'), named('seed')].filter(Boolean)
  $('settings-body').replaceChildren(
    group('System prompt', area('What the model is told first', 'system', 4, 'You are a storyteller.')),
    group('Sampling', ...main.map(number), ...limits.map(number), field('Stop strings', stop, 'one a line', true)),
    group('Reasoning', choice('Effort', 'reasoning', REASONING, 'for models that think before they answer')),
    group('Form of the answer', choice('The answer is', 'format', FORMATS), schema,
      area('Tools', 'tools', 3, '[{"type": "function", …}]', (text) => jsonProblem(text, Array.isArray, 'Tools are a list.'), 'functions that the model may call, as the API takes them')),
    group('Speculation', field('Drafts', draftChoice, draft.drafter ? `by ${draft.drafter}, as long as pays; the text is the same` : draft.reason ?? 'the text is the same'),
      choice('Twin without it', 'twin', TWINS, 'the same request with speculation off; “after” measures each alone, “beside” lets both run at once')),
    el('details', {}, el('summary', {}, `All other samplers (${others.length})`), el('div', {}, ...others.map(number))),
  )
}
