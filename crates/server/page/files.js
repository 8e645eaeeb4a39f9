// Pictures and text files that go with a message, from drops, pastes and the file dialog.
import { el, iconButton, size } from './dom.js'

// A pasted text longer than this becomes a file.
export const PASTE_CHARS = 4000
const TEXT_BYTES_MAX = 2_000_000
const PICTURE_BYTES_MAX = 10_000_000

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result)
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(file)
  })
}

// Reads a file; an error says why it is none that can be sent.
export async function read(file) {
  const { name, type } = file
  if (type.startsWith('image/')) {
    if (file.size > PICTURE_BYTES_MAX) throw new Error(`${name} is larger than ${size(PICTURE_BYTES_MAX)}.`)
    return { name: name || 'picture', kind: 'picture', size: file.size, data: await dataUrl(file) }
  }
  if (file.size > TEXT_BYTES_MAX) throw new Error(`${name} is larger than ${size(TEXT_BYTES_MAX)}.`)
  try {
    const data = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer())
    if (data.includes('\0')) throw new Error()
    return { name, kind: 'text', size: file.size, data }
  } catch {
    throw new Error(`${name} is neither a picture nor text.`)
  }
}

export const pasted = (text, n) => ({ name: `pasted-${n}.txt`, kind: 'text', size: new Blob([text]).size, data: text })

// What is shown of a file; `onremove` where it can still be taken out.
export function chip(file, onremove) {
  return el(
    'span', { className: 'file' },
    file.kind === 'picture' && el('img', { src: file.data, alt: '' }),
    el('span', { className: 'name' }, file.name),
    el('span', { className: 'size' }, size(file.size)),
    onremove && iconButton('close', `Remove ${file.name}`, onremove),
  )
}

// A message's content as the API takes it.
export function content(text, files = []) {
  const texts = files.filter((file) => file.kind === 'text').map(({ name, data }) => {
    const longest = Math.max(2, ...[...data.matchAll(/`+/g)].map((m) => m[0].length))
    const fence = '`'.repeat(longest + 1)
    return `${name}:\n${fence}\n${data}\n${fence}\n\n`
  })
  const whole = texts.join('') + text
  const pictures = files.filter((file) => file.kind === 'picture')
  if (!pictures.length) return whole
  const parts = pictures.map((file) => ({ type: 'image_url', image_url: { url: file.data } }))
  return whole ? [...parts, { type: 'text', text: whole }] : parts
}
