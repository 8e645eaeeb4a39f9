// Elements by hand: text only ever becomes text, never markup.

export const $ = (id) => document.getElementById(id)

// An element with properties and children; a property that is undefined is left out.
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value)
    else if (name in made && !name.includes('-')) made[name] = value
    else made.setAttribute(name, value === true ? '' : value)
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false))
  return made
}

const SVG = 'http://www.w3.org/2000/svg'
const ICONS = {
  menu: 'M4 6h16M4 12h16M4 18h16',
  close: 'M6 6l12 12M18 6L6 18',
  plus: 'M12 5v14M5 12h14',
  tint: 'M4 7h7M15 7h5M4 12h3M11 12h9M4 17h11M19 17h1',
  theme: 'M12 4a8 8 0 1 0 8 8 6 6 0 0 1-8-8z',
  help: 'M9.5 9.2a2.6 2.6 0 1 1 3.6 2.4c-.8.4-1.1.9-1.1 1.9M12 17.2v.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z',
  sliders: 'M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4',
  clip: 'M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.700 4.700L9.300 17a1.700 1.700 0 0 1-2.400-2.400L14.500 7',
  up: 'M12 19V5M6 11l6-6 6 6',
  down: 'M12 5v14M6 13l6 6 6-6',
  stop: 'M7 7h10v10H7z',
  copy: 'M9 9h10v11H9zM5 15V4h10',
  check: 'M5 12.500l4.500 4.500L19 7.500',
  edit: 'M4 20h4L19.500 8.500l-4-4L4 16zM13 7l4 4',
  again: 'M20 11a8 8 0 1 0-2.300 6.700M20 5v6h-6',
  left: 'M14 6l-6 6 6 6',
  right: 'M10 6l6 6-6 6',
  twin: 'M4 5h6v14H4zM14 5h6v14h-6z',
  trash: 'M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13',
  export: 'M12 4v11M8 8l4-4 4 4M5 14v6h14v-6',
}

export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg')
  svg.setAttribute('viewBox', '0 0 24 24')
  svg.setAttribute('class', 'i')
  svg.setAttribute('aria-hidden', 'true')
  const path = document.createElementNS(SVG, 'path')
  path.setAttribute('d', ICONS[name])
  svg.append(path)
  return svg
}

// A button that is an icon, with a name for those who cannot see it.
export function iconButton(name, label, onclick, properties = {}) {
  return el('button', { type: 'button', className: 'icon', title: label, 'aria-label': label, onclick, ...properties }, icon(name))
}

export function setIcon(button, name) {
  button.querySelector('svg')?.remove()
  button.prepend(icon(name))
}

export const plural = (n, one) => `${n.toLocaleString('en')} ${one}${n === 1 ? '' : 's'}`

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} KB` : `${(bytes / 1e6).toFixed(1)} MB`
}

// Asks in a dialog: resolves to the text that was typed (true where there is no field), or null.
export function ask({ title, text = '', label, value = '', ok = 'OK', type = 'text' }) {
  const dialog = $('ask-dialog')
  $('ask-title').textContent = title
  $('ask-text').textContent = text
  $('ask-text').hidden = !text
  $('ask-field').hidden = !label
  $('ask-label').textContent = label ?? ''
  $('ask-input').value = value
  $('ask-input').type = type
  $('ask-ok').textContent = ok
  $('ask-cancel').onclick = () => dialog.close('')
  dialog.returnValue = ''
  dialog.showModal()
  if (label) $('ask-input').select()
  return new Promise((resolve) => {
    const done = () => resolve(dialog.returnValue !== 'yes' ? null : label ? $('ask-input').value : true)
    dialog.addEventListener('close', done, { once: true })
  })
}

// Copies a text; `button` says so for a moment, showing `done` in place of what it shows.
export async function copy(text, button, ...done) {
  try {
    await navigator.clipboard.writeText(text)
  } catch {
    // Under a plain address of the network browsers have no clipboard but this.
    const field = el('textarea', { value: text, className: 'hidden' })
    button.after(field)
    field.select()
    document.execCommand('copy')
    field.remove()
    button.focus()
  }
  const shown = [...button.childNodes]
  button.replaceChildren(...done)
  setTimeout(() => button.replaceChildren(...shown), 1500)
}

// Hands a file to the browser's downloads.
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }))
  el('a', { href: url, download: name }).click()
  setTimeout(() => URL.revokeObjectURL(url), 1000)
}
