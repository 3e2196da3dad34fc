// What an answer's passes add up to. It does not know the page; times are in seconds, as the server sends them.

const RECENT = 2; // seconds that the speed of a running answer looks back

export class Account {
  constructor() {
    this.passes = [];
    this.origins = new Map(); // method, or "" for the target's own -> tokens
  }

  add(pass) {
    this.passes.push(pass);
    const own = pass.tokens.length - pass.num_accepted;
    this.#count("", own);
    if (pass.draft) this.#count(pass.draft.method, pass.num_accepted);
  }

  #count(origin, count) {
    this.origins.set(origin, (this.origins.get(origin) ?? 0) + count);
  }

  get numTokens() {
    return this.passes.reduce((sum, pass) => sum + pass.tokens.length, 0);
  }

  get numDrafted() {
    return this.passes.reduce((sum, pass) => sum + numNodes(pass), 0);
  }

  get numAccepted() {
    return this.passes.reduce((sum, pass) => sum + pass.num_accepted, 0);
  }

  // Tokens per second, and what plain decoding would give, of the last passes or all. The first pass is left out: its
  // time is the prompt's too. measured: nobody predicts, so plain is what the passes without a draft took.
  speeds(recent = Infinity) {
    let tokens = 0, seconds = 0, plain = 0;
    const known = this.passes.at(-1)?.plain_seconds != null;
    for (let i = this.passes.length - 1; i > 0 && seconds < recent; i--) {
      const pass = this.passes[i];
      tokens += pass.tokens.length;
      seconds += pass.seconds;
      plain += pass.tokens.length * (pass.plain_seconds ?? 0);
    }
    if (!known) plain = tokens * this.#undraftedSeconds();
    return { now: tokens ? tokens / seconds : null, plain: plain ? tokens / plain : null, measured: !known };
  }

  get liveSpeeds() {
    return this.speeds(RECENT);
  }

  #undraftedSeconds() {
    const plain = this.passes.slice(1).filter((pass) => !pass.draft);
    return plain.length ? plain.reduce((sum, pass) => sum + pass.pass_seconds, 0) / plain.length : 0;
  }

  // Per position 1, 2, ...: how many drafts reached it, and in how many of them it was accepted.
  get positions() {
    const found = [];
    for (const pass of this.passes) {
      for (let i = 0; i < deepest(pass); i++) {
        found[i] ??= { reached: 0, accepted: 0 };
        found[i].reached += 1;
        found[i].accepted += i < pass.num_accepted ? 1 : 0;
      }
    }
    return found;
  }
}

export function numNodes(pass) {
  return pass.draft ? pass.draft.tokens.length : 0;
}

function deepest(pass) {
  if (!pass.draft) return 0;
  const depths = [];
  for (const parent of pass.draft.parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(...depths);
}
