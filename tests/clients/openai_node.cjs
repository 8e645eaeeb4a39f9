// openai-node: chat, streams, schemas with zod, tools run to the end, errors.
const { OpenAI, BadRequestError } = require('openai')
const { zodFunction, zodResponseFormat } = require('openai/helpers/zod')
const { z } = require('zod')
const { check, main, QUESTION } = require('./common.cjs')

const MESSAGES = [{ role: 'user', content: 'Tell me a story.' }]
const City = z.object({ name: z.string().max(12), size: z.enum(['small', 'large']) })

const client = (server) => new OpenAI({ baseURL: server.v1, apiKey: 'none', maxRetries: 0 })
const fields = (server, more) => ({ model: server.model, messages: MESSAGES, temperature: 0, max_tokens: 300, seed: 1, ...more })

main({
  async chat(server) {
    const answer = await client(server).chat.completions.create(fields(server))
    check(answer.choices[0].message.content && answer.usage.completion_tokens > 0, answer)
  },

  async stream(server) {
    const whole = await client(server).chat.completions.create(fields(server))
    const stream = await client(server).chat.completions.create(fields(server, { stream: true, stream_options: { include_usage: true } }))
    let text = ''
    let usage
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? ''
      usage = chunk.usage ?? usage
    }
    check(text === whole.choices[0].message.content, text)
    check(usage.completion_tokens === whole.usage.completion_tokens, usage)
    const left = await client(server).chat.completions.create(fields(server, { stream: true }))
    left.controller.abort()
  },

  async parse(server) {
    for (let seed = 0; seed < 8; seed++) {
      const answer = await client(server).chat.completions.parse(
        fields(server, { temperature: 1, seed, response_format: zodResponseFormat(City, 'city') }),
      )
      check(City.safeParse(answer.choices[0].message.parsed).success, answer.choices[0])
    }
  },

  async run_tools(server) {
    const asked = []
    const tool = zodFunction({
      name: 'get_weather',
      description: 'Get the current weather in a city.',
      parameters: z.object({ city: z.string() }),
      function: ({ city }) => {
        asked.push(city)
        return '21 degrees'
      },
    })
    for (const stream of [false, true]) {
      const runner = client(server).chat.completions.runTools(
        fields(server, { messages: [{ role: 'user', content: QUESTION }], tools: [tool], stream }),
        { maxChatCompletions: 4 },
      )
      const last = await runner.finalChatCompletion()
      check(last.choices[0].finish_reason !== null, last)
    }
    check(asked.length >= 2, asked)
  },

  async completions_and_models(server) {
    const answer = await client(server).completions.create({ model: server.model, prompt: 'Once upon a time', max_tokens: 10 })
    check(answer.choices[0].text, answer)
    const models = await client(server).models.list()
    check(models.data[0].id === server.model, models)
  },

  async errors(server) {
    const long = [{ role: 'user', content: 'word '.repeat(20000) }]
    const error = await client(server).chat.completions.create(fields(server, { messages: long })).catch((e) => e)
    check(error instanceof BadRequestError && error.code === 'context_length_exceeded', error)
  },
})
