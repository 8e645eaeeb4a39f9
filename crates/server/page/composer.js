// The box that messages are written in, and the files that go with them.
import { $ } from './dom.js'
import * as files from './files.js'

let attachments = []
let pastes = 0

// What has been written, which is gone from the box then; null where there is nothing to send.
export function take() {
  const content = $('composer').value
  if (!content.trim() && !attachments.length) return null
  const message = { content, ...(attachments.length && { files: attachments }) }
  $('composer').value = ''
  attachments = []
  showAttachments()
  grow()
  return message
}

// Gives the box the height of its text.
function grow() {
  const field = $('composer')
  field.style.height = 'auto'
  field.style.height = `${field.scrollHeight}px`
}

function showAttachments() {
  $('attachments').hidden = !attachments.length
  $('attachments').replaceChildren(...attachments.map((file) => files.chip(file, () => {
    attachments = attachments.filter((other) => other !== file)
    showAttachments()
    $('composer').focus()
  })))
}

async function attach(list, banner) {
  for (const file of list) {
    try {
      attachments.push(await files.read(file))
    } catch (error) {
      banner(error.message)
    }
  }
  showAttachments()
  $('composer').focus()
}

// Takes files, and a long text as one.
function paste(event, { banner, status }) {
  const pasted = [...event.clipboardData.files]
  const text = event.clipboardData.getData('text/plain')
  const isLong = text.length > files.PASTE_CHARS
  if (!pasted.length && !isLong) return
  event.preventDefault()
  if (pasted.length) return attach(pasted, banner)
  attachments.push(files.pasted(text, ++pastes))
  showAttachments()
  status('The long paste is a file now')
}

// Files may be dropped anywhere on the page.
function listenToDrops(banner) {
  let depth = 0
  const show = (by) => ({ dataTransfer }) => {
    if ([...dataTransfer.types].includes('Files')) $('drop').hidden = (depth += by) < 1
  }
  addEventListener('dragenter', show(1))
  addEventListener('dragleave', show(-1))
  addEventListener('dragover', (event) => event.preventDefault())
  addEventListener('drop', (event) => {
    event.preventDefault()
    depth = 0
    $('drop').hidden = true
    attach([...event.dataTransfer.files], banner)
  })
}

// Listens to the box; `say` has `submit` for Enter, and `banner` and `status` for what is said.
export function listen(say) {
  $('composer').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return
    event.preventDefault()
    say.submit()
  })
  $('composer').addEventListener('input', grow)
  $('composer').addEventListener('paste', (event) => paste(event, say))
  $('attach').addEventListener('click', () => $('attach-file').click())
  $('attach-file').addEventListener('change', () => {
    attach([...$('attach-file').files], say.banner)
    $('attach-file').value = ''
  })
  listenToDrops(say.banner)
}
