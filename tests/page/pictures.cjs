// Takes the pictures of the page in docs/images: `node pictures.cjs http://HOST:PORT FOLDER`.
const path = require('node:path')
const { PROMPT, answer, launch, open, ready } = require('./common.cjs')

async function main() {
  const [address, folder] = process.argv.slice(2)
  if (!folder) {
    console.error(`usage: node ${process.argv[1]} http://HOST:PORT FOLDER`)
    process.exit(2)
  }
  const browser = await launch()
  const take = async (name, options, work) => {
    const { page, context } = await open(browser, address, { viewport: { width: 1120, height: 720 }, reducedMotion: 'reduce', ...options })
    await ready(page)
    await work(page)
    await page.mouse.move(0, 0)
    await page.evaluate(() => document.activeElement.blur())
    await page.screenshot({ path: path.join(folder, name) })
    await context.close()
  }
  const toTop = (page) => page.evaluate(() => document.querySelector('#scroller').scrollTo(0, 0))
  await take('page-speculation.png', { colorScheme: 'light' }, async (page) => {
    await answer(page, PROMPT)
    await page.click('#tint')
    await page.waitForSelector('.report')
    await page.evaluate(() => document.querySelector('#scroller').scrollTo(0, 1e6))
  })
  await take('page-twin.png', { colorScheme: 'dark' }, async (page) => {
    await page.click('#open-settings')
    await page.fill('[name=stop]', ' "I like')
    await page.click('#close-settings')
    await page.click('#open-sidebar')
    await answer(page, 'Tell me a story about a boat.')
    await page.click('#tint')
    await page.click('[aria-label="Compare with speculation off"]')
    await page.waitForSelector('.verdict b')
    await page.evaluate(() => document.querySelector('.report').remove())
    await page.evaluate(() => document.querySelector('.twins').scrollIntoView())
  })
  await take('page-phone.png', { viewport: { width: 390, height: 760 }, isMobile: true, hasTouch: true, colorScheme: 'light' }, async (page) => {
    await answer(page, PROMPT)
    await page.tap('#tint')
    await toTop(page)
  })
  await browser.close()
}

main()
