// The way to the server: the key, errors as the server says them, and server-sent events.

const STORED = "legato-api-key";

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set(value) {
    sessionStorage.setItem(STORED, value);
    document.dispatchEvent(new Event("keychange"));
  },
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  if (!/^[\x20-\x7e]*$/.test(key.get())) throw new ApiError(401, "The API key has characters that no key has.");
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

// The data of each event, as it comes.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice("data: ".length);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops listening hangs up; one that has failed cannot be cancelled
  }
}
