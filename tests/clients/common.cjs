// What the scripts for Node share; common.py says how a script is called.
const QUESTION = 'What is the weather in Rome?'

function check(holds, what) {
  if (!holds) throw new Error(JSON.stringify(what) ?? String(what))
}

// Runs `cases` in their order; exits with 1 if one fails.
async function main(cases) {
  const address = process.argv[2]
  if (!address) {
    console.error(`usage: node ${process.argv[1]} http://HOST:PORT`)
    process.exit(2)
  }
  const v1 = address.replace(/\/$/, '') + '/v1'
  const models = await (await fetch(v1 + '/models')).json()
  const server = { v1, model: models.data[0].id }
  const failed = []
  for (const [name, run] of Object.entries(cases)) {
    const start = performance.now()
    try {
      await run(server)
    } catch (error) {
      failed.push(name)
      console.error(error)
    }
    const seconds = ((performance.now() - start) / 1000).toFixed(1)
    console.log(`${failed.includes(name) ? 'FAILED' : 'ok'} ${name} (${seconds} s)`)
  }
  if (failed.length) {
    console.error(`${failed.length} failed with ${server.model}: ${failed.join(' ')}`)
    process.exit(1)
  }
  process.exit(0)
}

module.exports = { QUESTION, check, main }
