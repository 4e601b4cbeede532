// Streams a chat with the real openai client, and prints what came of it as JSON.
import OpenAI from "openai";

const [baseURL, apiKey, content] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model: "smollm2", messages: [{ role: "user", content }], temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
const pieces = [];
let usage = null;
for await (const chunk of stream) {
  if (chunk.choices.length) pieces.push(chunk.choices[0].delta.content ?? "");
  usage = chunk.usage ?? usage;
}
const refused = await client.chat.completions.create({ ...asked, temperature: -1, stream: true }).then(
  () => null,
  (error) => ({ status: error.status, param: error.param }),
);
const left = await client.chat.completions.create({ ...asked, max_tokens: 2000, ignore_eos: true, stream: true });
for await (const _ of left) break; // which closes the connection
console.log(JSON.stringify({ whole: whole.choices[0].message.content, pieces, usage, refused }));
