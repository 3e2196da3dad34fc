// Talks to the server. It does not know the page. Addresses are relative, so a proxy may serve all this below a path.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not ours: a proxy's page, say
  }
  throw new Refused(response.status, message);
}

export async function model(key) {
  const response = await checked(await fetch("v1/models", { headers: headers(key) }));
  return (await response.json()).data[0];
}

// The chunks of an answer, as they come. Throws Refused, or what fetch throws; signal: an AbortSignal.
export async function* ask(body, key, signal) {
  const response = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers(key) },
      body: JSON.stringify({ ...body, stream: true, pilotfish: { trace: true } }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the connection broke before the answer's end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error.message);
      yield chunk;
    }
  }
}
