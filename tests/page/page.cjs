// The chat page in a browser, against a live server: `node page.cjs http://HOST:PORT [CASE…]`.
const fs = require('node:fs')
const http = require('node:http')
const { CHROMIUM, PROMPT, answer, check, launch, open, ready, say, settled } = require('./common.cjs')

// A setting of the open conversation.
async function set(page, name, value) {
  if (await page.locator('#settings').isHidden()) await page.click('#open-settings')
  const field = page.locator(`#settings [name="${name}"]`)
  if (!(await field.isVisible())) await page.click('#settings details summary')
  if ((await field.evaluate((f) => f.tagName)) === 'SELECT') await field.selectOption(value)
  else await field.fill(value)
}

const shown = (page) => page.locator('.message').allInnerTexts()
const assistant = (page) => page.locator('.message.assistant').last()

// Stands between the page and the server, so that it can go away. `slow` holds back what is
// streamed until it is called off; `key` is the API key that it wants; `seen` has the bodies of
// chat requests.
async function between(address) {
  const to = new URL(address)
  const state = { key: null, isDown: false, isSlow: false, seen: [], sockets: new Set() }
  const server = http.createServer((request, response) => {
    if (state.isDown) return request.socket.destroy()
    if (state.key && request.url.startsWith('/v1/') && request.headers.authorization !== `Bearer ${state.key}`) {
      response.writeHead(401, { 'content-type': 'application/json' })
      return response.end(JSON.stringify({ error: { message: 'send a valid API key' } }))
    }
    const body = []
    request.on('data', (part) => body.push(part))
    request.on('end', () => {
      const whole = Buffer.concat(body)
      if (request.url.endsWith('/chat/completions')) state.seen.push(JSON.parse(whole))
      const headers = { ...request.headers, host: to.host }
      delete headers.origin
      const asked = http.request({ host: to.hostname, port: to.port, path: request.url, method: request.method, headers }, (answered) => {
        response.writeHead(answered.statusCode, answered.headers)
        answered.on('data', async (part) => {
          if (state.isSlow && request.method === 'POST') {
            answered.pause()
            response.write(part)
            setTimeout(() => answered.resume(), 60)
          } else response.write(part)
        })
        answered.on('end', () => response.end())
        answered.on('error', () => response.destroy())
      })
      asked.on('error', () => response.destroy())
      response.on('close', () => asked.destroy())
      asked.end(whole)
    })
  })
  server.on('connection', (socket) => {
    state.sockets.add(socket)
    socket.on('close', () => state.sockets.delete(socket))
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  state.address = `http://127.0.0.1:${server.address().port}/`
  state.down = () => {
    state.isDown = true
    for (const socket of state.sockets) socket.destroy()
  }
  state.close = () => {
    state.down()
    server.close()
  }
  return state
}

const CASES = {
  async sends_and_streams({ page }) {
    await ready(page)
    const text = await answer(page)
    check(text.length > 20, text)
    check((await shown(page))[0].startsWith(PROMPT), 'the message is shown')
    check(/\d+ tokens/.test(await assistant(page).locator('.summary').innerText()), 'the account is shown')
    check((await page.title()).startsWith(PROMPT.slice(0, 10)), await page.title())
  },

  async copies_with_and_without_a_clipboard({ page }) {
    const text = await answer(page)
    await page.click('.message.assistant [aria-label="Copy"]')
    const norm = (one) => one.replace(/\s+/g, ' ').trim()
    check(norm(await page.evaluate(() => navigator.clipboard.readText())) === norm(text), 'the answer is on the clipboard')
    await page.evaluate(() => {
      navigator.clipboard.writeText('') // and then none, as under a plain address of the network
      globalThis.copied = ''
      navigator.clipboard.writeText = () => Promise.reject(new Error('no clipboard'))
      document.addEventListener('copy', () => (globalThis.copied = String(document.activeElement.value)))
    })
    await page.locator('.message.user').hover()
    await page.click('.message.user [aria-label="Copy"]')
    await page.waitForFunction((prompt) => globalThis.copied === prompt, PROMPT)
  },

  async stops_and_keeps_what_was_written({ page, via }) {
    via.isSlow = true
    await say(page, PROMPT)
    await page.waitForFunction(() => document.querySelector('.message.assistant .prose')?.textContent.length > 5)
    await page.keyboard.press('Escape')
    await page.waitForSelector('.message.assistant >> text=Stopped.')
    const kept = await assistant(page).locator('.prose').innerText()
    await page.waitForTimeout(500)
    check(kept === (await assistant(page).locator('.prose').innerText()), 'nothing is written after a stop')
    via.isSlow = false
    check((await answer(page, 'Tell me another one.')).length > 10, 'it goes on')
  },

  async edits_and_branches({ page }) {
    const first = await answer(page)
    await page.locator('.message.user').hover()
    await page.click('.message.user [aria-label="Edit"]')
    await page.fill('.editor textarea', 'Tell me a story about a boat.')
    await page.press('.editor textarea', 'Enter')
    await settled(page)
    const second = await assistant(page).locator('.prose').innerText()
    check(first !== second, 'another question, another answer')
    check((await page.locator('.message.user .branches').innerText()).includes('2/2'), 'two versions')
    await page.click('.message.user [aria-label="Earlier version"]')
    check((await assistant(page).locator('.prose').innerText()) === first, 'the first answer is back')
    await page.click('.message.assistant [aria-label="Write another answer"]')
    await settled(page)
    check((await page.locator('.message.assistant .branches').innerText()).includes('2/2'), 'two answers')
    await page.keyboard.press('Alt+j')
    check((await page.locator('.message.assistant .branches').innerText()).includes('1/2'), 'the first by its key')
    check((await page.locator('.message').count()) === 2, 'one branch is shown')
  },

  async a_reload_keeps_history({ page }) {
    const text = await answer(page)
    await page.click('#new-chat')
    await answer(page, 'Tell me a story about a boat.')
    await page.reload()
    await ready(page)
    check((await page.locator('.entry').count()) === 2, 'both conversations are there')
    check((await shown(page))[0].startsWith('Tell me a story about a boat.'), 'the open one is open')
    await page.click('.entry .open >> text=fox')
    check((await assistant(page).locator('.prose').innerText()) === text, 'the text is the same')
    check((await assistant(page).locator('.summary').innerText()).includes('tokens'), 'and its account')
  },

  async searches_renames_and_deletes({ page }) {
    await answer(page)
    await page.click('#new-chat')
    await answer(page, 'Tell me a story about a boat.')
    await page.keyboard.press('Control+k')
    await page.keyboard.type('BOAT')
    check((await page.locator('.entry').count()) >= 1, 'the boat is found')
    check((await page.locator('.entry mark').first().innerText()).toLowerCase() === 'boat', 'and marked')
    await page.fill('#search', 'zzzz')
    check((await page.locator('#history').innerText()).includes('Nothing found'), 'nothing is said to be found')
    await page.fill('#search', '')
    await page.locator('.entry.current').hover()
    await page.click('.entry.current [aria-label^="Rename"]')
    await page.fill('#ask-input', 'Of boats')
    await page.press('#ask-input', 'Enter')
    await page.waitForSelector('.entry >> text=Of boats')
    await page.locator('.entry.current').hover()
    await page.click('.entry.current [aria-label^="Delete"]')
    await page.click('#ask-ok')
    await page.waitForFunction(() => document.querySelectorAll('.entry').length === 1)
    await page.reload()
    await ready(page)
    check((await page.locator('.entry').count()) === 1, 'deleted for good')
  },

  async exports_and_imports({ page, browser, address }) {
    const text = await answer(page)
    const [file] = await Promise.all([page.waitForEvent('download'), page.click('#export-all')])
    const path = await file.path()
    const { format, conversations } = JSON.parse(fs.readFileSync(path, 'utf8'))
    check(format === 'paceline-conversations' && conversations.length === 1, format)
    const other = await open(browser, address)
    await other.page.setInputFiles('#import-file', path)
    await other.page.waitForSelector('.message.assistant .prose')
    check((await assistant(other.page).locator('.prose').innerText()) === text, 'the same text elsewhere')
    await other.page.setInputFiles('#import-file', path)
    await other.page.waitForFunction(() => document.querySelectorAll('.entry').length === 2)
    const [child] = Object.keys(conversations[0].nodes)
    delete conversations[0].nodes[child]
    for (const [body, says] of [['{', 'not JSON'], ['{}', 'no conversations'], [JSON.stringify({ format, conversations }), 'damaged']]) {
      await other.page.setInputFiles('#import-file', { name: 'bad.json', mimeType: 'application/json', buffer: Buffer.from(body) })
      await other.page.waitForFunction((part) => document.querySelector('#banner').textContent.includes(part), says)
    }
    check((await other.page.locator('.entry').count()) === 2, 'bad files change nothing')
    check(other.wrongs.length === 0, other.wrongs)
    await other.context.close()
  },

  async a_twin_writes_the_same_text({ page, via }) {
    for (const [mode, temperature] of [['', '0'], ['after', '0.9'], ['beside', '0.9']]) {
      await page.click('#new-chat')
      await set(page, 'temperature', temperature)
      await set(page, 'max_tokens', '120')
      await set(page, 'twin', mode)
      await answer(page)
      if (!mode) {
        await page.click('[aria-label="Compare with speculation off"]')
        await page.waitForSelector('.verdict b')
      }
      check((await page.locator('.verdict').last().innerText()).includes('The same text'), await page.locator('.verdict').last().innerText())
      const sides = await page.locator('.twins > section .prose').allInnerTexts()
      check(sides.length === 2 && sides[0] === sides[1] && sides[0].length > 20, sides)
      const [on, off] = via.seen.slice(-2).sort((a) => (a.speculation === 'off' ? 1 : -1))
      check(off.speculation === 'off' && on.speculation.trace === true && on.seed === off.seed, [on, off])
    }
    await page.reload()
    await ready(page)
    check((await page.locator('.verdict').innerText()).includes('The same text'), 'a twin is kept')
    await page.keyboard.press('Alt+t')
    check((await page.locator('.twins').count()) === 0, 'and closed by its key')
  },

  async tints_say_who_guessed_each_token({ page }) {
    await answer(page)
    check((await page.locator('.t').count()) === 0, 'no tints unasked')
    await page.keyboard.press('Alt+s')
    const drafter = (await page.locator('#drafter').innerText()).replace('drafts: ', '')
    // On a busy machine a text may be drafted for little, for drafts are as long as pays.
    for (let n = 0; n < 8 && (await page.locator('.t.p2').count()) === 0; n++) {
      await page.keyboard.press('Alt+r')
      await settled(page)
    }
    const tinted = await page.locator(`.t.${drafter}`).count()
    check(tinted > 2, `${tinted} guesses of ${drafter}`)
    check((await page.locator('.t.p2').count()) > 0, 'guesses beyond the first')
    const id = await assistant(page).getAttribute('data-id')
    const text = await assistant(page).locator('.prose').innerText()
    const whole = await assistant(page).locator('.prose').evaluate((prose) => {
      const spans = [...prose.querySelectorAll('.t, .own')].map((span) => span.textContent).join('')
      return { all: prose.textContent, spans }
    })
    check(whole.all === whole.spans, whole)
    await page.keyboard.press('Alt+s')
    check(text === (await assistant(page).locator('.prose').innerText()), 'tints leave the text as it is')
    await page.keyboard.press('Alt+s')
    // What the server has told of each token, against what is seen of it.
    const told = await page.evaluate(async (shown) => {
      const [{ all }, { spans }] = await Promise.all([import('/page/store.js'), import('/page/speculation.js')])
      const node = (await all())[0].nodes[shown]
      const seen = spans(node.rounds, node.content).filter(({ kind, start, end }) => kind && node.content.slice(start, end).trim())
      const accepted = node.rounds.map((round) => round.accepted).reduce((a, b) => a + b)
      return { seen: seen.length, accepted, record: node.record.speculation.accepted }
    }, id)
    const visible = (await page.locator('.t').allTextContents()).filter((one) => one.trim()).length
    check(visible === told.seen && told.seen > 0.7 * told.accepted && told.accepted === told.record, { visible, ...told })
    check((await page.locator('.report').innerText()).includes(`${told.accepted} of `), 'the report agrees')
    check((await page.locator('.t').first().getAttribute('title')).includes('guessed by'), 'each says its place')
  },

  async grammars_tint_what_they_force({ page }) {
    await set(page, 'format', 'schema')
    await set(page, 'schema', '{"type": "object"')
    check((await page.locator('#settings .field:has([name=schema]) small').innerText()).includes('Not JSON'), 'a bad schema is named')
    const schema = { type: 'object', additionalProperties: false, required: ['favorite_color'], properties: { favorite_color: { enum: ['red', 'green'] } } }
    await set(page, 'schema', JSON.stringify(schema))
    await page.click('#tint')
    const text = await answer(page, 'Describe a person.')
    check(['red', 'green'].includes(JSON.parse(text).favorite_color), text)
    check((await page.locator('.t.grammar').count()) > 1, 'forced tokens are tinted')
  },

  async every_option_goes_into_the_request({ page, via }) {
    await ready(page)
    const values = { temperature: '0.7', top_p: '0.9', top_k: '40', min_p: '0.05', max_tokens: '12', seed: '7', repetition_penalty: '1.1', presence_penalty: '0.2', frequency_penalty: '0.1', dry_multiplier: '0.5' }
    for (const [name, value] of Object.entries(values)) await set(page, name, value)
    await set(page, 'system', 'Be brief.')
    await set(page, 'stop', 'zzz\nyyy')
    await set(page, 'reasoning', 'none')
    await set(page, 'draft_max', '1')
    await answer(page)
    const sent = via.seen.at(-1)
    for (const [name, value] of Object.entries(values)) check(sent[name] === Number(value), [name, sent[name]])
    check(sent.messages[0].role === 'system' && sent.messages[0].content === 'Be brief.', sent.messages)
    check(JSON.stringify(sent.stop) === '["zzz","yyy"]' && sent.reasoning_effort === 'none', sent)
    check(sent.speculation.draft_max === 1, sent.speculation)
    const names = await page.evaluate(async () => (await (await fetch('/v1/models')).json()).data[0].meta.options.map((o) => o.name))
    check(names.length > 20, names)
    for (const name of names) check((await page.locator(`#settings [name="${name}"]`).count()) === 1, `no field for ${name}`)
    await set(page, 'temperature', '9')
    check((await page.locator('[name=temperature]').getAttribute('class')).includes('bad'), 'what is out of range is shown')
  },

  async files_and_pictures({ page, via }) {
    const long = 'A long text. '.repeat(400)
    await page.evaluate((text) => {
      const data = new DataTransfer()
      data.setData('text/plain', text)
      document.querySelector('#composer').dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }))
    }, long)
    await page.waitForSelector('.attachments >> text=pasted-1.txt')
    await page.evaluate(() => {
      const data = new DataTransfer()
      data.items.add(new File(['key: value\n'], 'notes.yaml', { type: '' }))
      dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }))
    })
    await page.waitForSelector('.attachments >> text=notes.yaml')
    await page.click('[aria-label="Remove pasted-1.txt"]')
    await set(page, 'max_tokens', '20')
    await answer(page, 'What is in it?')
    check(via.seen.at(-1).messages[0].content.startsWith('notes.yaml:\n```\nkey: value\n'), via.seen.at(-1).messages)
    await page.setInputFiles('#attach-file', { name: 'bad.bin', mimeType: '', buffer: Buffer.from([0, 255, 254]) })
    await page.waitForFunction(() => document.querySelector('#banner').textContent.includes('neither a picture nor text'))
    await page.click('#new-chat')
    const png = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='
    await page.setInputFiles('#attach-file', { name: 'dot.png', mimeType: 'image/png', buffer: Buffer.from(png, 'base64') })
    await page.waitForSelector('.attachments img')
    await say(page, 'What is this?')
    await settledOrRefused(page)
    const [picture] = via.seen.at(-1).messages[0].content
    check(picture.image_url.url === `data:image/png;base64,${png}`, picture)
    await page.locator('.message.user').hover()
    await page.click('.message.user [aria-label="Edit"]')
    await page.click('.editor [aria-label="Remove dot.png"]')
    await page.press('.editor textarea', 'Enter')
    await settled(page)
    check(via.seen.at(-1).messages[0].content === 'What is this?', via.seen.at(-1).messages)
  },

  async tools_are_called_and_answered({ page, via }) {
    const tool = { type: 'function', function: { name: 'get_weather', description: 'Get the current weather in a city.', parameters: { type: 'object', properties: { city: { type: 'string', description: 'The name of the city.' } }, required: ['city'] } } }
    await set(page, 'tools', JSON.stringify([tool]))
    await answer(page, 'What is the weather in Rome?').catch(() => {})
    await page.waitForSelector('.call >> text=get_weather')
    await page.fill('.call textarea', '21 degrees')
    await page.click('#tint')
    await page.click('text=Send the result')
    await page.waitForFunction(() => document.querySelectorAll('.message.assistant').length === 2)
    await settled(page)
    const sent = via.seen.at(-1).messages
    check(sent.at(-1).role === 'tool' && sent.at(-1).content === '21 degrees' && sent.at(-1).tool_call_id === sent.at(-2).tool_calls[0].id, sent)
  },

  async thinking_is_folded({ page }) {
    await set(page, 'reasoning', 'high')
    await set(page, 'temperature', '0.8')
    await say(page, PROMPT)
    await settled(page)
    if ((await page.locator('.thinking').count()) === 0) return 'SKIPPED: the model did not think'
    check(await page.locator('.thinking').evaluate((d) => !d.open), 'folded')
    await page.click('.thinking summary')
    await page.waitForFunction(() => document.querySelector('.thinking .prose').innerText.trim().length > 0)
  },

  async a_lost_server_is_said_and_found_again({ page, via }) {
    await ready(page)
    via.isSlow = true
    await say(page, PROMPT)
    await page.waitForFunction(() => document.querySelector('.message.assistant .prose')?.textContent.length > 5)
    via.down()
    await page.waitForSelector('.error >> text=The connection was lost')
    check(await page.locator('#banner').isVisible(), 'the page says that it looks for the server')
    via.isDown = via.isSlow = false
    await page.waitForFunction(() => document.querySelector('#banner').hidden)
    await page.click('.error >> text=Try again')
    await page.waitForFunction(() => !document.querySelector('.error'))
    await settled(page)
    check((await assistant(page).locator('.prose').innerText()).length > 20, 'written at the second try')
    check((await page.locator('.message.assistant .branches').innerText()).includes('2/2'), 'what was written first is kept')
  },

  async a_key_is_asked_for_and_kept({ browser, via }) {
    via.key = 'right'
    const { page, context, wrongs } = await open(browser, via.address, { allowed: /status of 401/ })
    await page.waitForSelector('#ask-dialog[open]')
    await page.fill('#ask-input', 'wrong')
    await page.press('#ask-input', 'Enter')
    await page.waitForSelector('#ask-text >> text=not one of the server')
    await page.fill('#ask-input', 'right')
    await page.press('#ask-input', 'Enter')
    await ready(page)
    check((await answer(page)).length > 20, 'answered with the key')
    await page.reload()
    await ready(page)
    check(await page.locator('#ask-dialog').isHidden(), 'asked for once')
    check(wrongs.length === 0, wrongs)
    await context.close()
  },

  async two_tabs_agree({ page, context }) {
    await answer(page)
    const other = await context.newPage()
    await other.goto(page.url())
    await ready(other)
    await answer(other, 'Tell me another one.')
    await page.evaluate(() => document.dispatchEvent(new Event('visibilitychange')))
    await page.waitForFunction(() => document.querySelectorAll('.message').length === 4)
    await answer(page, 'And one more.')
    await other.reload()
    await ready(other)
    check((await other.locator('.message').count()) === 6, 'nothing is lost')
  },

  async keys_and_dialogs({ page }) {
    await ready(page)
    await page.locator('#help').focus()
    await page.keyboard.press('/')
    check(await page.evaluate(() => document.activeElement.id === 'composer'), 'to the message box')
    await page.locator('#help').focus()
    await page.keyboard.press('?')
    check(await page.locator('#help-dialog').isVisible(), 'the list of keys')
    await page.keyboard.press('Escape')
    check(await page.locator('#help-dialog').isHidden(), 'and away')
    await page.keyboard.press('Alt+p')
    check(await page.locator('#settings').isVisible(), 'settings')
    await page.keyboard.press('Escape')
    check(await page.locator('#settings').isHidden(), 'and away')
    await page.keyboard.press('Alt+b')
    check(await page.locator('#sidebar').isHidden(), 'no conversations')
    await page.keyboard.press('Alt+b')
    await page.locator('#theme').focus()
    await page.keyboard.press('Enter')
    check((await page.evaluate(() => document.documentElement.dataset.theme)) === 'light', 'light')
    await page.keyboard.press('Enter')
    await page.reload()
    check((await page.evaluate(() => document.documentElement.dataset.theme)) === 'dark', 'dark, and kept')
    await ready(page)
    await page.fill('#composer', 'one')
    await page.press('#composer', 'Shift+Enter')
    check((await page.inputValue('#composer')) === 'one\n', 'a line break')
  },

  async fits_a_phone({ browser, address }) {
    const { page, context, wrongs } = await open(browser, address, { viewport: { width: 360, height: 720 }, hasTouch: true, isMobile: true })
    await ready(page)
    const isWide = () => page.evaluate(() => document.documentElement.scrollWidth > innerWidth || [...document.querySelectorAll('button, input, textarea, select')].some((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.code, .table')))
    check(!(await isWide()), 'too wide when empty')
    await page.tap('#tint')
    await answer(page)
    check(!(await isWide()), 'too wide with an answer')
    await page.tap('[aria-label="Compare with speculation off"]')
    await page.waitForSelector('.verdict b')
    check(!(await isWide()), 'too wide with a twin')
    for (const [button, panel] of [['#open-sidebar', '#sidebar'], ['#open-settings', '#settings']]) {
      await page.tap(button)
      check(await page.locator(panel).isVisible(), panel)
      check(!(await isWide()), `too wide with ${panel}`)
      await page.tap(`${panel} [aria-label^="Close"]`)
      check(await page.locator(panel).isHidden(), `${panel} closes`)
    }
    check(wrongs.length === 0, wrongs)
    await context.close()
  },

  async axe_finds_nothing({ page }) {
    let axe
    try {
      axe = fs.readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8')
    } catch {
      return 'SKIPPED: axe (package axe-core is not installed)'
    }
    const look = async (what) => {
      // Evaluated by the debugger, so the page's policy stays as it is.
      await page.evaluate(axe)
      const { violations, passes } = await page.evaluate(() => globalThis.axe.run())
      check(violations.length === 0, [what, violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html.slice(0, 200) + node.failureSummary)])])
      check(passes.length > 15, `${what}: axe looked at ${passes.length} things only`)
    }
    await ready(page)
    for (const theme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme: theme, reducedMotion: 'reduce' })
      await page.click('#new-chat')
      await look(`${theme}, empty`)
      await answer(page)
      if ((await page.locator('#tint').getAttribute('aria-pressed')) === 'false') await page.click('#tint')
      await page.click('[aria-label="Compare with speculation off"]')
      await page.waitForSelector('.verdict b')
      if (await page.locator('#settings').isHidden()) await page.click('#open-settings')
      await page.locator('#settings details').evaluate((details) => (details.open = true))
      await page.locator('.entry').first().hover()
      await look(`${theme}, everything open`)
      await page.click('#help')
      await look(`${theme}, help`)
      await page.keyboard.press('Escape')
    }
  },

  async markdown_is_shown_and_never_markup({ page }) {
    const source = '# One\n\nA *b* **c** `d` [e](https://x.test/) [f](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n- one\n  - two\n- three\n\n| a | b |\n| --- | --: |\n| 1 | 2 |\n\n```js\nlet x = "<b>"\n```\n\n> quoted\n\n1. x\n2. y\n'
    const made = await page.evaluate(async (text) => {
      const { block, split } = await import('/page/markdown.js')
      const root = document.createElement('div')
      for (const { source: one } of split(text)) root.append(block(one))
      const count = (selector) => root.querySelectorAll(selector).length
      return { h2: count('h2'), em: count('em'), strong: count('strong'), links: [...root.querySelectorAll('a')].map((a) => [a.href, a.rel]), img: count('img, script, b'), nested: count('li li'), cells: count('td'), right: count('td.right'), code: root.querySelector('pre').textContent, quote: count('blockquote'), ordered: count('ol li'), text: root.textContent }
    }, source)
    check(made.h2 === 1 && made.em === 1 && made.strong === 1 && made.img === 0 && made.nested === 1 && made.cells === 2 && made.right === 1 && made.quote === 1 && made.ordered === 2, made)
    check(made.links.length === 1 && made.links[0][0] === 'https://x.test/' && made.links[0][1].includes('noopener'), made.links)
    check(made.code === 'let x = "<b>"' && made.text.includes('<img src=x onerror=alert(1)>'), made)
    // Texts that are all markup take no long time.
    const ms = await page.evaluate(async () => {
      const { block, split } = await import('/page/markdown.js')
      const start = performance.now()
      for (const text of ['*'.repeat(5000), '['.repeat(5000), '`'.repeat(5000), '_a '.repeat(2000), '> '.repeat(2000), '- '.repeat(2000), '|a'.repeat(2000)]) split(text).map(({ source: one }) => block(one))
      return performance.now() - start
    })
    check(ms < 3000, `${ms} ms`)
  },
}

// Where a picture is refused, the server's own words are shown.
async function settledOrRefused(page) {
  await page.waitForFunction(() => document.querySelector('#send').getAttribute('aria-label') === 'Send' && document.querySelector('.message.assistant .error, .message.assistant .summary'))
  const error = page.locator('.message.assistant .error')
  if (await error.count()) check((await error.innerText()).length > 40, await error.innerText())
}

// What the browser itself reports where a case takes the server away or asks for what is refused.
const ALLOWED = { a_key_is_asked_for_and_kept: /status of 401/, a_lost_server_is_said_and_found_again: /ERR_|Failed to load/, files_and_pictures: /status of 400/ }

async function main() {
  const [address, ...wanted] = process.argv.slice(2)
  if (!address) {
    console.error(`usage: node ${process.argv[1]} http://HOST:PORT [CASE…]`)
    process.exit(2)
  }
  if (!fs.existsSync(CHROMIUM)) {
    console.log(`SKIPPED: page (no Chromium at ${CHROMIUM}; CHROMIUM=PATH names another one)`)
    process.exit(0)
  }
  const browser = await launch()
  const failed = []
  for (const [name, run] of Object.entries(CASES)) {
    if (wanted.length && !wanted.includes(name)) continue
    const start = performance.now()
    const via = await between(address)
    const { page, context, wrongs } = await open(browser, via.address, { allowed: ALLOWED[name] })
    let said
    try {
      said = await run({ page, context, browser, via, address: via.address })
      check(wrongs.length === 0, wrongs)
    } catch (error) {
      failed.push(name)
      console.error(`${name}: ${error.stack}`)
    }
    await context.close()
    via.close()
    const seconds = ((performance.now() - start) / 1000).toFixed(1)
    console.log(said ?? `${failed.includes(name) ? 'FAILED' : 'ok'} ${name} (${seconds} s)`)
  }
  await browser.close()
  if (failed.length) console.error(`${failed.length} failed: ${failed.join(' ')}`)
  process.exit(failed.length ? 1 : 0)
}

main()
