/* Search runs in a worker, which browsers refuse to a page that was opened from the disk: there, in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script")
          Object.assign(script, { src: source, onload: done, onerror: failed })
          inner.document.body.append(script)
        })
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...sources) => sources.reduce((before, each) => before.then(() => load(each)), Promise.resolve())
      this.ready = load(url)
    }
    set onmessage(listener) {
      this.addEventListener("message", listener)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
