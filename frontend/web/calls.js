// The tool calls of an answer, and the fields for their results.

export const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

export class Calls {
  #form;
  #blocks = [];
  list = []; // as in a message: {id, type, function: {name, arguments}}

  constructor(form) {
    this.#form = form;
  }

  // Adds fragments of calls as they arrive in a stream.
  take(pieces) {
    for (const { index, id, function: piece } of pieces) {
      if (!this.list[index]) this.#begin(index, id, piece.name);
      this.list[index].function.arguments += piece.arguments ?? "";
      this.#blocks[index].querySelector(".arguments").textContent = this.list[index].function.arguments;
    }
  }

  #begin(index, id, name) {
    this.list[index] = { id, type: "function", function: { name, arguments: "" } };
    const fresh = copyOf("call");
    this.#blocks[index] = fresh.querySelector(".call");
    fresh.querySelector(".name").textContent = name;
    this.#form.append(fresh);
    this.#form.hidden = false;
  }

  // Shows fields for the results; `give(messages)` receives them.
  offer(give) {
    const fields = this.#blocks.map((block) => block.querySelector("textarea"));
    for (const block of this.#blocks) block.querySelector(".result").hidden = false;
    const button = document.createElement("button");
    button.textContent = fields.length > 1 ? "Go on with these results" : "Go on with this result";
    this.#form.append(button);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      give(fields.map((field, i) => ({ role: "tool", tool_call_id: this.list[i].id, content: field.value })));
    });
  }
}

// Disables the fields once the conversation has gone on: results can no longer be sent.
export function closeCalls(log) {
  for (const field of log.querySelectorAll(".calls textarea")) field.readOnly = true;
  for (const button of log.querySelectorAll(".calls button")) button.remove();
}
