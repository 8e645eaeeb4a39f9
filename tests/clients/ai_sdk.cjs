// Vercel's AI SDK with @ai-sdk/openai-compatible: text, streams, objects, a turn with a tool.
const { generateObject, generateText, stepCountIs, streamText, tool } = require('ai')
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible')
const { z } = require('zod')
const { check, main, QUESTION } = require('./common.cjs')

globalThis.AI_SDK_LOG_WARNINGS = false

const City = z.object({ name: z.string().max(12), size: z.enum(['small', 'large']) })

const fields = (server, more) => {
  const options = { name: 'local', baseURL: server.v1, supportsStructuredOutputs: true, includeUsage: true }
  return { model: createOpenAICompatible(options)(server.model), temperature: 0, maxOutputTokens: 300, seed: 1, maxRetries: 0, ...more }
}

main({
  async text(server) {
    const whole = await generateText(fields(server, { prompt: 'Tell me a story.' }))
    check(whole.text && whole.usage.outputTokens > 0, whole)
    const stream = streamText(fields(server, { prompt: 'Tell me a story.' }))
    let text = ''
    for await (const piece of stream.textStream) text += piece
    check(text === whole.text, text)
    check((await stream.usage).outputTokens === whole.usage.outputTokens, await stream.usage)
  },

  async generate_object(server) {
    for (let seed = 0; seed < 6; seed++) {
      const { object } = await generateObject(fields(server, { temperature: 1, seed, schema: City, prompt: 'Name a city.' }))
      check(City.safeParse(object).success, object)
    }
  },

  async a_turn_with_a_tool(server) {
    const asked = []
    const get_weather = tool({
      description: 'Get the current weather in a city.',
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        asked.push(city)
        return '21 degrees'
      },
    })
    const more = { tools: { get_weather }, prompt: QUESTION, stopWhen: stepCountIs(4) }
    const whole = await generateText(fields(server, more))
    check(asked.length > 0 && whole.steps.length > 1, whole.steps)
    const stream = streamText(fields(server, more))
    await stream.consumeStream()
    check(asked.length > 1 && (await stream.text) === whole.text, await stream.text)
    const must = await generateText(fields(server, { ...more, stopWhen: stepCountIs(1), toolChoice: 'required' }))
    check(must.toolCalls[0].toolName === 'get_weather', must.toolCalls)
  },
})
