// What the scripts share: a browser that reaches nothing but the server under test.
const { chromium } = require('playwright-core')

const CHROMIUM = process.env.CHROMIUM ?? '/usr/bin/chromium'
// Without these, a browser as root does not start, or looks for hosts of its maker.
const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
]
const PROMPT = 'Tell me a story about a fox.'

function check(holds, what) {
  if (!holds) throw new Error(typeof what === 'string' ? what : JSON.stringify(what))
}

const launch = () => chromium.launch({ executablePath: CHROMIUM, args: FLAGS })

// A page of the server in a fresh profile. What it must never do is noted in `wrongs`: errors of
// the console (what a case brings about on purpose is in `allowed`), and requests to other hosts.
async function open(browser, address, options = {}) {
  const { allowed, ...rest } = options
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, permissions: ['clipboard-read', 'clipboard-write'], ...rest })
  const page = await context.newPage()
  const wrongs = []
  page.on('console', (message) => {
    const text = message.text()
    if (message.type() === 'error' && !(allowed && allowed.test(text))) wrongs.push(text)
  })
  page.on('pageerror', (error) => wrongs.push(error.stack))
  page.on('request', (request) => {
    const url = new URL(request.url())
    if (!['data:', 'blob:'].includes(url.protocol) && url.origin !== new URL(address).origin) wrongs.push(`asked ${request.url()}`)
  })
  await page.goto(address)
  return { page, context, wrongs }
}

// Waits until the page knows the model.
const ready = (page) => page.waitForFunction(() => document.querySelector('#drafter').textContent !== '')

// Sends a message.
async function say(page, text) {
  await page.fill('#composer', text)
  await page.press('#composer', 'Enter')
}

// Waits until nothing is being written.
const settled = (page) => page.waitForFunction(() => document.querySelector('#send').getAttribute('aria-label') === 'Send' && document.querySelector('#announce').textContent !== '')

// Sends a message, and waits for the answer's text.
async function answer(page, text = PROMPT) {
  await say(page, text)
  await settled(page)
  return page.locator('.message.assistant').last().locator('.prose').last().innerText()
}

module.exports = { CHROMIUM, PROMPT, answer, check, launch, open, ready, say, settled }
