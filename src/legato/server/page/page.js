import { call, key } from "./api.js";
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";

const keyField = document.getElementById("key");
keyField.value = key.get();
keyField.addEventListener("change", () => key.set(keyField.value.trim()));

async function nameModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    document.getElementById("model").textContent = data[0].id;
    document.title = `${data[0].id} · Legato`;
  } catch {
    document.getElementById("model").textContent = ""; // the engine's view and the chat say what is wrong
  }
}

document.addEventListener("keychange", nameModel);
nameModel();
new Chat();
new EngineView().run();
